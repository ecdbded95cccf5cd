"""Checkpoints: folders that are written atomically, with a checksum of each file.

``checkpoint_folders`` creates, lists and removes folders, and describes their content in a manifest.
``tensor_file`` writes tensors as safetensors, ``checkpoint_reader`` reads tables for any number of shards.
``stored_keys`` has the format of growing tables. ``deltas`` describes the changes between two steps, which
followers of a run read. Each role writes its own files; the master commits the checkpoint (``workers``).
"""

"""Checkpoints: folders that are written atomically, with a checksum of each file.

``checkpoint_folders`` creates, lists and removes the folders, and lists their files in a manifest.
``tensor_file`` writes and reads safetensors. ``checkpoint_reader`` reads the tables of a checkpoint.
``stored_keys`` defines the files of growing tables. ``deltas`` stores only the changes between two steps.
Each role writes its own files. Then the master (package ``workers``) adds the manifest.
"""

"""Checkpoints: folders that are there whole or not at all, with a checksum of everything in them.

Begin with ``folders``: what makes a folder one. ``manifest`` says what it holds, ``tensor_file`` writes
tensors as safetensors, ``reader`` reads them for any split of the tables. Roles write their own parts; the
master makes it a checkpoint (``workers``).
"""

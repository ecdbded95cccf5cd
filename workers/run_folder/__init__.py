"""The files of a run: their names, writing them, locking the folder, and the rules for resuming.

``run_paths`` names the files. ``run_files`` writes them (``append_only_file``, ``curves``), ``run_access``
locks a run and copies its files to a store, ``run_state`` reads a run before it is resumed.
"""

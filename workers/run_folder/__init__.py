"""The files of a run: their names, writing them, locking the folder, and the rules for resuming.

``run_paths`` names the files. ``run_files`` writes them (``append_only_file``, ``curves``), ``remote_run``
copies them to a store, ``run_lock`` allows one launch at a time, ``run_state`` and ``resume`` read a run
before it is resumed.
"""

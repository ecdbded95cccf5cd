"""What a run leaves behind: its files, who may write them, how far it has come, what it may change.

Begin with ``paths``, which names its files. ``folder`` writes it (``appended_file``, ``curves``),
``run_lock`` lets one launch at a time into it, ``run_state`` and ``resume`` read it before a run goes on.
Jobs and the launcher use it.
"""

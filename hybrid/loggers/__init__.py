"""The records of a run: lines of ``metrics.jsonl``, and calls of the loggers in ``cluster.loggers``.

``record_file`` writes and reads the lines. ``run_loggers`` calls the loggers, each in its thread: those in
``tools``, and classes of the user.
"""

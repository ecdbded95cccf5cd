"""The records of a run: lines of ``metrics.jsonl``, and calls of the loggers in ``cluster.loggers``.

``record_file`` writes and reads the lines. ``run_loggers`` calls each logger in its own thread. A logger is a
class in ``tools``, or a class of the user.
"""

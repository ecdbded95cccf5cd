"""A job on a cluster, from the master's side: its objects on other roles, and the calls to them.

Begin with ``session``. ``deployment`` creates tables and writes checkpoints, also for scripts.
``remote_trainer`` is the object on each trainer. ``user_code_jobs`` has the jobs of scripts and functions.
``shared_folders`` checks that all hosts share the folders of a run.
"""

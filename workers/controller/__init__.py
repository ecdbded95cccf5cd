"""The master's side of a job: the objects of the job on other roles, and calls to these objects.

Begin with ``session``. ``deployment`` creates tables and writes checkpoints, also for scripts.
``remote_trainer`` is the object on each trainer. ``script_job`` runs a script.
``shared_folders`` checks that all hosts share the folders of a run.
"""

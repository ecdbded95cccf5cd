"""The master's side of a job: the objects of the job on other roles, and calls to these objects.

Begin with ``session``; ``stream_session`` is for streams. ``deployment`` creates tables and checkpoints.
``remote_trainer`` is the object on each trainer. ``script_job`` runs a script.
``shared_folders`` checks that all hosts share the folders of a run.
"""

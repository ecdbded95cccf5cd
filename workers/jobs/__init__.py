"""The jobs of the master: training and comparison; ``workers.controller.script_job`` has the job of a script.

Begin with ``training_job``. ``checkpoint_schedule`` decides when checkpoints are written and which are kept.
It also counts samples, seconds and skipped steps. ``comparison`` trains twice and measures the difference.
"""

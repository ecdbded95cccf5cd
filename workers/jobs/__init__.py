"""The jobs of a master: train, compare, or run user code.

Begin with ``training_job``. ``checkpoint_schedule`` decides when a checkpoint is due and which are kept,
``run_counters`` counts what a checkpoint must restore. ``comparison`` trains twice and measures the
difference. ``user_code_jobs`` run a script or a function.
"""

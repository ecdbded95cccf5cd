"""The jobs of a master that train and compare; ``workers.controller.user_code_jobs`` has the others.

Begin with ``training_job``. ``checkpoint_schedule`` decides when a checkpoint is due, and which are kept, and
has the counts that a checkpoint restores. ``comparison`` trains twice and measures the difference.
"""

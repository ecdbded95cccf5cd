"""The jobs of a master that train and compare; ``workers.controller.user_code_jobs`` has the others.

Begin with ``training_job``. ``checkpoint_schedule`` decides when a checkpoint is written and which ones are
kept, and has the counts in a checkpoint. ``comparison`` trains twice and measures the difference.
"""

"""The jobs of a master that train and compare; ``workers.controller.script_job`` has the job of a script.

Begin with ``training_job``. ``checkpoint_schedule`` decides when a checkpoint is written and which ones are
kept, and has the counts in a checkpoint. ``comparison`` trains twice and measures the difference.
"""

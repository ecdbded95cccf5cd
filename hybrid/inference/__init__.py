"""Inference with a trained model in one process.

Begin with ``trained_module``, which has ``hybrid.load``. ``trained_run`` reads a checkpoint, ``raw_rows``
turns raw values into batches, ``custom_module`` is the model of a custom training loop,
``followed_run`` keeps a model current while its run trains, and ``program_export`` writes files for other
programs.
"""

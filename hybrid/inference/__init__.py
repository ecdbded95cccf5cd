"""Inference with a trained model in one process.

Begin with ``trained_module``, which has ``hybrid.load``. ``trained_run`` reads a checkpoint, ``raw_rows``
turns raw values into batches, and ``program_export`` writes files for other programs.
"""

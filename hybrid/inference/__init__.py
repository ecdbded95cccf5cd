"""Inference with a trained model in one process.

Begin with ``trained_module``, which has ``hybrid.load``. ``trained_run`` reads a checkpoint, ``raw_rows``
turns raw values into batches, and ``table_modules`` has the tables. ``custom_module`` is the model of a
custom training loop, and ``followed_run`` keeps a model current while its run trains. ``program_export`` and
``table_export`` write files for serving, and ``items`` ranks the items of a retrieval task.
"""

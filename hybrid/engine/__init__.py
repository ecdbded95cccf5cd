"""The training step, for configured runs and custom loops.

``train_step`` is the step, ``hybrid_model`` the model across processes. ``step_feed`` starts lookups in time,
``ddp`` and ``gradient_reduction`` sum gradients over trainers, ``update_guard`` clips and skips updates.
``table_setup`` and ``model_builder`` build tables and nets from a configuration.
"""

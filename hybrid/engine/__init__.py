"""The training step, for configured runs and custom loops.

``train_step`` is the step, ``hybrid_model`` the model across processes. ``step_feed`` starts lookups in time,
``ddp`` sums gradients over trainers, ``update_guard`` clips and skips updates. ``model_builder`` builds
tables and nets from a configuration.
"""

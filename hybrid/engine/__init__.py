"""The training step, for configured runs and custom loops.

``step_engine`` takes the steps, ``hybrid_model`` is the model across processes. ``step_feed`` starts lookups
in time, ``ddp`` sums gradients over trainers, ``update_guard`` clips and skips updates. ``model_builder``
builds tables and nets from a configuration.
"""

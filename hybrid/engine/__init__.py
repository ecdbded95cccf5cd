"""The training step, for configured runs and custom loops.

``step_engine`` takes the steps, ``hybrid_model`` is the model across processes. ``step_feed`` starts lookups
in time, ``uneven_batches`` gives all trainers the same steps, ``ddp`` sums gradients over trainers, and
``update_guard`` clips and skips updates. ``losses``, ``ranking_losses`` and ``retrieval`` compute the loss of
a configured run. ``model_builder`` builds its tables and nets, ``initial_model`` finds initial values in
other runs, and ``execution_backends`` compiles, replicates or splits stages.
"""

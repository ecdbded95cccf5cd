"""The training step, for configured runs and custom loops.

``step_engine`` runs the steps: lookups, backward pass, and the decision to clip or skip updates.
``uneven_batches`` gives all trainers the same number of steps, and ``ddp`` sums gradients over trainers. The
other modules are mainly for configured runs: ``hybrid_model`` is the model, and ``losses``,
``ranking_losses`` and ``retrieval`` compute the loss. ``model_builder`` builds tables and nets,
``initial_model`` finds initial values, ``execution_backends`` compiles or parallelizes nets.
"""

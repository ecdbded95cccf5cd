"""A module whose layers are split over several processes.

Begin with ``tensor``: ``TensorParallel`` holds shards, and makes DTensors of them for a forward pass.
``plan`` says how layers are split, ``shared_stage`` brings the samples of a tensor group together for one.
``training/forms`` puts the stages of a net into it; users may, too.
"""

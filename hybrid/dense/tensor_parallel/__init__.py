"""Tensor parallelism: the layers of a module are split over several processes.

``sharded_module.TensorParallel`` holds shards, and computes with DTensors. ``sharding_plan`` defines how
layers are split, ``shared_stage`` gathers the samples of a tensor group. The engine wraps the stages of a net
in these; users may do the same.
"""

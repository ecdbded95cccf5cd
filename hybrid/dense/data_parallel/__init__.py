"""Data parallelism on several devices of one process, as in ``torch.nn.parallel``, but also for CPUs.

``replicas.DataParallel`` scatters its inputs, runs replicas concurrently, and gathers their outputs
(``scatter_gather``, ``parallel_apply``). The engine wraps the stages of a net in it; users may do the same.
"""

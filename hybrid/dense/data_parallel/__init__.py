"""Copies of a module on several devices of one process: torch's data parallelism, for CPUs too.

Begin with ``replica``: ``DataParallel`` scatters its input, runs the copies at the same time, and gathers
what they give (``scatter_gather``, ``parallel_apply``). ``training/forms`` puts the stages of a net into
it; users may, too.
"""

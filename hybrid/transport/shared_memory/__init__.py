"""Shared memory between the processes of one host, and what is aggregated through it.

Begin with ``shared_block``.
"""

"""Calls between processes over ``torch.distributed.rpc``: endpoints, stubs, pending results and failures.

Begin with ``stubs``.
"""

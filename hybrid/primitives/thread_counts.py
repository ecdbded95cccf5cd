"""The number of cores that torch uses in a thread."""

import torch


def use_configured_threads() -> None:
    """Let operations of the calling thread use as many cores as ``torch.set_num_threads`` has set.

    A new thread uses all cores, or ``OMP_NUM_THREADS``, until torch applies the setting in the thread's first
    operation on large tensors. Until then, matrix products differ in their last bits from products in other
    threads, and processes compete for cores.
    """
    torch.get_num_threads()

"""The number of cores that torch uses in a thread."""

import torch


def use_configured_threads() -> None:
    """Let operations of the calling thread use as many cores as ``torch.set_num_threads`` has set.

    OpenMP has a number for each thread of a process: at first all cores, or ``OMP_NUM_THREADS``. In a thread
    that Python or RPC started, torch applies its own number only with an operation on large tensors. Until
    then, products have other last bits, and processes compete for cores.
    """
    torch.get_num_threads()

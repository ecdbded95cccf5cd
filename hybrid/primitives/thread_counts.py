"""The number of cores that torch uses in a thread."""

import torch


def use_configured_threads() -> None:
    """Let operations of the calling thread use as many cores as ``torch.set_num_threads`` has set.

    OpenMP keeps a number for each thread: at first all cores, or ``OMP_NUM_THREADS``. In a thread that Python
    or RPC started, torch sets this number only in its first operation on large tensors. Until then, matrix
    products differ in their last bits from those of other threads, and processes compete for cores.
    """
    torch.get_num_threads()

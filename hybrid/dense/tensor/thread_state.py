"""Python's state of threads that are not Python's own."""

from __future__ import annotations

import ctypes
import threading

_kept = threading.local()


def keep_thread_state() -> None:
    """Let the calling thread keep its Python state until it ends.

    RPC and distributed autograd run Python in threads of torch's own. These get a state when they come
    and lose it when they go, and with it all that is thread-local in Python. DTensor keeps there how it
    shards each operation, which takes it milliseconds to find out anew. Their pools are of fixed size, so
    that no more than a few states are kept.
    """
    if not hasattr(_kept, "is_kept"):
        # Never released: the count of who needs the state does not come back to zero.
        ctypes.pythonapi.PyGILState_Ensure()
        _kept.is_kept = True

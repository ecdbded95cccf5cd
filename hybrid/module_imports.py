"""The search path of modules, and fast imports. This module imports no other module of hybrid."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PROJECT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def exclude_working_directory() -> None:
    """Remove the working directory from Python's search path, unless PYTHONPATH names it.

    ``python -m`` and an empty entry of PYTHONPATH add the working directory. Torch and other packages would
    import optional modules, such as ``dill``, from this directory, where another user may have put files. If
    the working directory is the folder of this project, move it to the end of the path instead.
    """
    here = os.path.realpath(os.getcwd())
    if here in map(os.path.realpath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))):
        return
    others = [folder for folder in sys.path if os.path.realpath(folder) != here]
    sys.path[:] = [*others, here] if here == _PROJECT else others


@contextmanager
def fast_imports() -> Iterator[None]:
    """Pause garbage collection during a ``with`` block that imports large modules, such as torch.

    The collector takes a fifth of the time of importing torch, and finds nothing. At the end of the block,
    exclude all objects from later collections, which would copy the memory that forked processes share.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

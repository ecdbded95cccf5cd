"""How modules are found and imported. Runs first, so it imports no other module of the project."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PROJECT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def exclude_working_directory() -> None:
    """Make Python not search the working directory for modules, unless PYTHONPATH names it.

    Somebody else may have written the files there. Torch and other packages look for optional modules such as
    ``dill``, and would import them. ``python -m`` and an empty entry of PYTHONPATH add the working directory.
    If it has this project, it is searched last.
    """
    here = os.path.realpath(os.getcwd())
    if here in map(os.path.realpath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))):
        return
    others = [folder for folder in sys.path if os.path.realpath(folder) != here]
    sys.path[:] = [*others, here] if here == _PROJECT else others


@contextmanager
def fast_imports() -> Iterator[None]:
    """Speed up imports in this block of large modules that stay in memory, such as torch.

    Garbage collection takes a fifth of the time of importing torch and finds nothing. Freezing these objects
    keeps later collections from copying the memory that forked processes share.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

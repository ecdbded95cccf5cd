"""How modules are found and imported. Runs first, so it imports no other module of the project."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def search_working_directory_last() -> None:
    """Make Python search the working directory for modules, after all other folders.

    The working directory has the user's modules. ``python -m`` and an empty entry of PYTHONPATH put it first.
    There, a user's module could replace a module of Python, of this project, or of an installed package.
    """
    here = os.getcwd()
    others = [folder for folder in sys.path if os.path.realpath(folder) != os.path.realpath(here)]
    sys.path[:] = [*others, here]


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

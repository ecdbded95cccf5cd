"""How modules are found and imported. Imports nothing of the project, since it runs before the rest."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def search_working_directory_last() -> None:
    """Make Python search the working directory for modules, after all other folders.

    User code is found there, and cannot replace a module of Python, of this project, or of an installed
    package: ``python -m`` and an empty entry of PYTHONPATH put the working directory first.
    """
    here = os.getcwd()
    others = [folder for folder in sys.path if os.path.realpath(folder) != os.path.realpath(here)]
    sys.path[:] = [*others, here]


@contextmanager
def importing_much() -> Iterator[None]:
    """Import modules that stay for the life of the process, such as torch, faster in this block.

    Garbage collection takes a fifth of the time of importing torch and finds nothing. Freezing these objects
    keeps later collections from copying the memory that forked processes share.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

"""Where modules are looked for. Imports nothing of the project: it is there before all of that."""

import os
import sys


def search_here_last() -> None:
    """Have Python look for modules in the current folder, too, but there last.

    A net of the user's own is found there, and nothing in it takes the place of a module of Python, of this
    project, or of what is installed: ``python -m`` puts the current folder first, and so does a variable
    PYTHONPATH with an empty entry.
    """
    here = os.getcwd()
    kept = [folder for folder in sys.path if os.path.realpath(folder) != os.path.realpath(here)]
    sys.path[:] = [*kept, here]

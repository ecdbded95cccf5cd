"""Where torch keeps what it compiles. Free of torch, since it is decided before torch is imported."""

import atexit
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

from hybrid.storage.private_files import private_user_folder

# Of torch's compiler, and of kernels that torch brings for some GPUs. Left alone, both take a folder in the
# system's temporary one, of a name that anybody can take first, and load libraries that they find there.
_VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "QUACK_CACHE_DIR": "quack"}
# Headers that it compiles beforehand go there whatever is named: a kernel takes twice as long without, once.
_HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"


def choose_torch_cache() -> None:
    """Give torch folders in which nobody else can put anything, unless the user has named some.

    They are among the user's caches, and serve later runs as well; where there is no place that is the user's
    alone, they are new ones, which go with this process.
    """
    os.environ.setdefault(_HEADERS, "0")
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if not missing:
        return
    folder = private_user_folder("XDG_CACHE_HOME", ".cache", "torch") or _fresh()
    for name in missing:
        os.environ[name] = str(folder / _VARIABLES[name])


def _fresh() -> Path:
    folder = tempfile.mkdtemp(prefix="hybrid-torch-")
    atexit.register(partial(shutil.rmtree, folder, ignore_errors=True))
    return Path(folder)

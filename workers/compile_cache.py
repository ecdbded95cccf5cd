"""Where torch caches compiled code. Free of torch, since torch reads it at import."""

import atexit
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

from hybrid.storage.private_files import private_user_folder

# Of torch's compiler, and of kernels for some GPUs. By default both use a folder with a predictable name in
# the system's temporary folder, and load libraries that another user may have put there.
_VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "QUACK_CACHE_DIR": "quack"}
# Precompiled headers always go to the temporary folder; without them the first kernel takes twice as long.
_HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"


def choose_compile_cache() -> None:
    """Give torch private cache folders, unless the user has set some.

    They lie among the user's caches and serve later runs. If no private folder is possible there, a temporary
    one is removed at the end of this process.
    """
    os.environ.setdefault(_HEADERS, "0")
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if not missing:
        return
    folder = private_user_folder("XDG_CACHE_HOME", ".cache", "torch")
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="hybrid-torch-"))
        atexit.register(partial(shutil.rmtree, folder, ignore_errors=True))
    for name in missing:
        os.environ[name] = str(folder / _VARIABLES[name])

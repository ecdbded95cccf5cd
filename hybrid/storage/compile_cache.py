"""Private folders for the code that torch compiles. Without torch."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from hybrid.storage.private_files import private_user_folder

# Cache folders of torch's compiler, and of its kernels for some GPUs. The defaults have predictable names in
# the system's temporary folder, and torch loads libraries that another user may have put there.
_VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "QUACK_CACHE_DIR": "quack"}
# Torch writes precompiled headers to the temporary folder only. Without them the first compilation takes
# twice as long.
_HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"


def choose_compile_cache() -> None:
    """Give torch private cache folders, unless the user has set some.

    The folders are in the user's cache folder, so later runs use them again. If no private folder can be made
    there, torch and matplotlib get a temporary folder. The end of this process removes it.
    """
    os.environ.setdefault(_HEADERS, "0")
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if not missing:
        return
    folder = private_user_folder("XDG_CACHE_HOME", ".cache", "torch")
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="hybrid-torch-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ.setdefault("MPLCONFIGDIR", str(folder))  # else a warning if $HOME is read-only
    for name in missing:
        os.environ[name] = str(folder / _VARIABLES[name])

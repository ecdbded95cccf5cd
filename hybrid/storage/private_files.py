"""Private folders, and safe opening of files that another user may have placed. Does not import torch.

The files of a run contain the user's data, so new folders are private. An existing folder keeps its mode,
because its owner has decided who may read it. Every file of a run, a checkpoint, prepared data or pretrained
rows is opened by :func:`open_file`.
"""

import atexit
import os
import shutil
import stat
import tempfile
from pathlib import Path

from hybrid.errors import StorageError
from hybrid.storage.remote_path import RemotePath, StoragePath

# Cache folders of torch's compiler, and of its kernels for some GPUs. The defaults have predictable names in
# the system's temporary folder, and torch loads libraries that another user may have put there.
_COMPILE_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "QUACK_CACHE_DIR": "quack"}
# Torch writes precompiled headers to the temporary folder only. Without them the first compilation takes
# twice as long.
_PRECOMPILE_HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"


def make_folder(path: StoragePath) -> None:
    """Make a folder and the missing folders above it, private to their owner; existing ones are unchanged.

    Do nothing in a store, which needs no folders.
    """
    if isinstance(path, RemotePath):
        return
    try:
        path.mkdir(mode=stat.S_IRWXU, exist_ok=True)
    except FileNotFoundError:
        make_folder(path.parent)
        path.mkdir(mode=stat.S_IRWXU, exist_ok=True)


def open_file(
    path: str | Path, flags: int = os.O_RDONLY, root: Path | None = None, *, follows_links: bool = False
) -> int:
    """Open a regular file, and return its descriptor; usable as the ``opener`` of Python's :func:`open`.

    Links, FIFOs and devices are refused, because the folder of another user may contain them.

    Args:
        flags: as for :func:`os.open`.
        root: a folder above the file. The file and the folders below ``root`` must not be links; by default,
            only the file.
        follows_links: whether the file may be a link, because the user has named the file itself.

    Raises:
        StorageError: the file, or a folder below ``root``, is a link, or the file is not a regular file.
        OSError: the file cannot be opened.
    """
    if not follows_links:
        flags |= os.O_NOFOLLOW
        refuse_link(path, root)
    # O_NONBLOCK: a FIFO without a writer or a reader does not block.
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        reason = "is not a regular file; remove it"
        raise StorageError(f"{path}: {reason}", reason)
    return descriptor


def refuse_link(path: str | StoragePath, root: StoragePath | None = None) -> None:
    """Raise StorageError if a path is a symbolic link, because a link may lead to files of another run.

    Do nothing in a store, which has no links.

    Args:
        root: a folder above ``path``; the folders below it must not be links, either.
    """
    if isinstance(path, RemotePath):
        return
    inner: list[StoragePath] = [Path(path), *Path(path).parents]
    for each in inner[: 1 if root is None else inner.index(root)]:
        if Path(each).is_symlink():
            reason = "is a symbolic link, which is not followed here; remove it"
            raise StorageError(f"{each}: {reason}", reason)


def private_user_folder(variable: str, default: str, name: str = "") -> Path | None:
    """Return the folder LOCATION/hybrid/NAME, or LOCATION/hybrid without ``name``; make it if it is missing.

    Args:
        variable: the environment variable with LOCATION, such as XDG_CACHE_HOME.
        default: LOCATION relative to the user's home if the variable has no absolute path.

    Returns:
        The folder; None if it cannot be made, the user has no home, or other users could change its content.
    """
    base = os.environ.get(variable, "")
    if not os.path.isabs(base):  # the specification ignores relative paths
        base = os.path.expanduser(f"~/{default}")
    folder = Path(base, "hybrid", name)
    if not folder.is_absolute():  # the user has no home
        return None
    try:
        make_folder(folder)
        resolved = folder.resolve()
        is_private = resolved.stat().st_uid == os.geteuid() and not _is_writable_by_others(resolved)
        # In a folder with the sticky bit, other users cannot replace the user's folders.
        is_safe = not any(_is_writable_by_others(f, stat.S_ISVTX) for f in resolved.parents)
    except OSError:
        return None
    return folder if is_private and is_safe else None


def _is_writable_by_others(folder: Path, safe_mode: int = 0) -> bool:
    """Return whether a user other than this user and root owns a folder, or may write to it.

    Write permissions do not count if the folder has the mode bit ``safe_mode``, such as the sticky bit.
    """
    status = folder.stat()
    # A group with the number of the owner has no other members.
    group = stat.S_IWGRP if status.st_gid != status.st_uid else 0
    is_shared = status.st_mode & (group | stat.S_IWOTH) and not status.st_mode & safe_mode
    return bool(is_shared) or status.st_uid not in (0, os.geteuid(), _root_uid())


def _root_uid() -> int:
    """Return root's user id here: 0, or the overflow id in a user namespace that does not map root.

    The overflow id also stands for all other unmapped users, so only file modes can exclude these users.
    """
    try:
        ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if any(int(first) == 0 for first, _, _ in ranges):
            return 0
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 0


def sync(path: StoragePath) -> None:
    """Flush a local file, or the names in a local folder, to the disk."""
    if isinstance(path, RemotePath):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def choose_compile_cache() -> None:
    """Point torch's compile caches to private folders of this user, except caches that the user has set.

    If no private folder can be made, torch and Matplotlib get a temporary folder, which is removed at exit.
    Torch precompiles no headers, unless TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS is set.
    """
    os.environ.setdefault(_PRECOMPILE_HEADERS, "0")
    missing = [name for name in _COMPILE_CACHES if not os.environ.get(name)]
    if not missing:
        return
    folder = private_user_folder("XDG_CACHE_HOME", ".cache", "torch")
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="hybrid-torch-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ.setdefault("MPLCONFIGDIR", str(folder))  # matplotlib would warn if $HOME is read-only
    for name in missing:
        os.environ[name] = str(folder / _COMPILE_CACHES[name])

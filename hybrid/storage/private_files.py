"""Folders and files that only their owner can read. Without torch.

A run's files contain the user's data. New folders are private; an existing folder keeps its mode, since its
owner has decided who may read it, and new folders in it are private again.
"""

import errno
import os
import stat
from pathlib import Path

from hybrid.errors import HybridError


def make_folder(path: Path) -> None:
    """Make a private folder, and private ones for the missing folders above it.

    Raises:
        OSError: the folder cannot be made, or the path is a file.
    """
    try:
        path.mkdir(mode=stat.S_IRWXU, exist_ok=True)
    except FileNotFoundError:
        make_folder(path.parent)
        path.mkdir(mode=stat.S_IRWXU, exist_ok=True)


def open_file(path: str | Path, flags: int) -> int:
    """Open a file that is not a symbolic link; usable as the ``opener`` of Python's :func:`open`.

    Args:
        flags: of :func:`os.open`.

    Returns:
        The descriptor.

    Raises:
        HybridError: the file is a link.
        OSError: the file cannot be opened.
    """
    try:
        # O_NONBLOCK: a FIFO without a reader is an error.
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        raise


def refuse_link(path: str | Path) -> None:
    """Raise HybridError if a path is a symbolic link, since it may lead to files of another run."""
    if os.path.islink(path):
        raise HybridError(f"{path}: is a symbolic link, and files are not written through links; remove it")


def private_user_folder(variable: str, default: str, name: str = "") -> Path | None:
    """Return a folder of this project in the user's home, which is made if it is missing.

    Args:
        variable: environment variable of the XDG Base Directory Specification with the folder's location.
        default: the location below the user's home if the variable is not set.
        name: of a folder inside the project's folder.

    Returns:
        The folder; None if it cannot be made, or other users could change its content.
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
    """Return whether other users than this one and root can write to a folder.

    Args:
        safe_mode: mode bits that make shared write access harmless.
    """
    status = folder.stat()
    # A group with the number of the owner has no other members.
    group = stat.S_IWGRP if status.st_gid != status.st_uid else 0
    is_shared = status.st_mode & (group | stat.S_IWOTH) and not status.st_mode & safe_mode
    return bool(is_shared) or status.st_uid not in (0, os.geteuid(), _unmapped_uid())


def _unmapped_uid() -> int:
    """Return the user id of root's files in a user namespace without root, such as a launch's; else 0.

    Files of other users have this id there, too, so only their modes count.
    """
    try:
        ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if any(int(first) == 0 for first, _, _ in ranges):
            return 0
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 0


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

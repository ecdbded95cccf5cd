"""Folders and files that belong to the user alone. Free of torch.

What a run leaves behind holds the user's data, and others on the machine are not to read it: folders that are
made are their owner's alone. One that is there already stays as it is, since whoever made it has decided who
may look into it; what is made in it is private again.
"""

import errno
import os
import stat
from pathlib import Path

from hybrid.errors import HybridError

_OWNERS_ALONE = stat.S_IRWXU


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, for their owner alone.

    Raises:
        OSError: it cannot be made, or is there and no folder.
    """
    try:
        path.mkdir(mode=_OWNERS_ALONE, exist_ok=True)
    except FileNotFoundError:
        make_folder(path.parent)
        path.mkdir(mode=_OWNERS_ALONE, exist_ok=True)


def open_file(path: str | Path, flags: int) -> int:
    """A descriptor of a file; one of a link there is not, since it may lead anywhere.

    It can be the ``opener`` of Python's :func:`open`.

    Args:
        flags: of :func:`os.open`.

    Raises:
        HybridError: it is a link.
        OSError: it cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        raise


def refuse_link(path: str | Path) -> None:
    """Raise HybridError if a file or folder is a symbolic link, which may lead anywhere."""
    if os.path.islink(path):
        raise HybridError(f"{path}: is a link, and nothing is written through one; remove it")


def private_user_folder(variable: str, default: str, name: str = "") -> Path | None:
    """A folder of this project among the user's own, made where it is missing.

    Args:
        variable: names where such folders are, as the XDG Base Directory Specification says.
        default: where they are otherwise, below the user's home.
        name: of a folder in that of this project.

    Returns:
        None where there is no such place, or others could change what is in it.
    """
    base = os.environ.get(variable, "")
    if not os.path.isabs(base):  # the specification wants it to be
        base = os.path.expanduser(f"~/{default}")
    folder = Path(base, "hybrid", name)
    if not folder.is_absolute():  # who has no home
        return None
    try:
        make_folder(folder)
        return folder if _is_own(folder.resolve()) else None
    except OSError:
        return None


def _is_own(folder: Path) -> bool:
    """Whether nobody else can write to a folder, nor put another one in its place."""
    if folder.stat().st_uid != os.geteuid():
        return False
    return not _is_writable(folder, 0) and not any(_is_writable(f, stat.S_ISVTX) for f in folder.parents)


def _is_writable(folder: Path, harmless: int) -> bool:
    """Whether others than its owner, the user, and root can write to a folder."""
    status = folder.stat()
    # Who is given a group of his own, of the same number, is alone in it.
    group = stat.S_IWGRP if status.st_gid != status.st_uid else 0
    is_shared = status.st_mode & (group | stat.S_IWOTH) and not status.st_mode & harmless
    return bool(is_shared) or status.st_uid not in (0, os.geteuid(), _unmapped_uid())


def _unmapped_uid() -> int:
    """The user id of root's files in a user namespace without root, such as that of a launch; else 0.

    Files of other users have this id there, too, which is why only their modes count.
    """
    try:
        ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if any(int(first) == 0 for first, _, _ in ranges):
            return 0
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 0


def sync(path: Path) -> None:
    """See a file, or the names in a folder, safely on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

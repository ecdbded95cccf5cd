"""Access to a run: its lock, and the local files of a run in a store.

A store cannot append to a file. So logs, metrics.jsonl and other files are kept in a private folder of this
machine, which names the store, and are uploaded before each checkpoint and at the end. Checkpoints are
written to the store directly.
"""

import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hybrid.errors import ConfigError, HybridError, StorageError
from hybrid.storage import files
from hybrid.storage.private_files import make_folder, open_file, private_user_folder, refuse_link
from hybrid.storage.remote_path import RemotePath, StoragePath, parse_path
from workers.console.messages import print_line
from workers.run_folder.run_paths import run_write_errors

_STORE_FILE = ".store"  # contains the URL of the run
_DIGITS = 12
_CLOCK_TOLERANCE_NS = 60_000_000_000  # between the clocks of this machine and of the store
_NAME = ".lock"
_WAIT_SECONDS = 1.0  # the roles of a killed launch hold the lock for some milliseconds
_POLL_SECONDS = 0.02


def checkpoint_root(folder: Path) -> StoragePath:
    """Return where the run with this local folder keeps its checkpoints: a store, or the folder itself.

    Raises:
        HybridError: the folder names a store, but this program has not made it for that store.
    """
    path = folder / _STORE_FILE
    if not os.path.lexists(path):
        return folder
    try:
        run, status = parse_path(path.read_text(encoding="utf-8")), folder.stat()
    except (OSError, ValueError) as error:
        raise HybridError(f"{path}: cannot be read: {error}; remove it") from error
    is_private = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if not (isinstance(run, RemotePath) and is_private and folder.resolve() == _local_folder(run).resolve()):
        rule = "names a store, but this folder was not made for a run in it"
        raise HybridError(f"{path}: {rule}; remove the file, or name the run by its URL")
    return run


@contextmanager
def hold_run(run: StoragePath, is_resumed: bool) -> Iterator[tuple[Path, int]]:
    """Lock the local folder of a run; upload the files of a run in a store at the end.

    The files of a resumed run are fetched from the store first: another machine may have written them.

    Yields:
        The local folder, and the descriptor of its lock; see :func:`run_lock`.

    Raises:
        ConfigError: another launch holds the lock, or the folder cannot be made.
        HybridError: a folder in it is a symbolic link.
        StorageError: the store refuses.
    """
    if not isinstance(run, RemotePath):
        for name in ("logs", "profile"):
            refuse_link(run / name)
        with run_lock(run) as lock:
            yield run, lock
        return
    folder = _local_folder(run)
    with run_lock(folder) as lock:
        with run_write_errors(folder):
            (folder / _STORE_FILE).write_text(str(run), encoding="utf-8")
        print_line(f"logs and metrics are kept in {folder}, and sent to {run} with each checkpoint")
        if is_resumed:
            for entry in files.list_entries(run):
                if not entry.is_folder:
                    content = files.read_bytes(entry.path)
                    with run_write_errors(folder):
                        (folder / entry.path.name).write_bytes(content)
        try:
            yield folder, lock
        except BaseException:
            try:
                upload(folder)
            except StorageError as error:  # the first error is the one to report
                print_line(f"{error}; {folder} has all files", to_stderr=True)
            raise
        upload(folder)


def _local_folder(run: RemotePath) -> Path:
    digest = hashlib.sha256(str(run).encode()).hexdigest()[:_DIGITS]
    folder = private_user_folder("XDG_STATE_HOME", ".local/state", "runs")
    if folder is None:
        rule = "a run in a store needs a private folder on this machine"
        raise HybridError(f"{run}: {rule}; set XDG_STATE_HOME to a folder that only you can write to")
    return folder / f"{run.name}-{digest}"


def upload(folder: Path) -> None:
    """Upload the files of a run in a store that may have changed since the last upload.

    Raises:
        StorageError: the store refuses.
    """
    store = checkpoint_root(folder)
    if not isinstance(store, RemotePath):
        return
    uploaded = {entry.path: entry for part in (store, store / "logs") for entry in files.list_entries(part)}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if any(part.startswith(".") for part in relative.parts) or not path.is_file():
            continue
        target = store / str(relative)
        status, entry = path.stat(), uploaded.get(target)
        is_older = entry is not None and status.st_mtime_ns < entry.mtime_ns - _CLOCK_TOLERANCE_NS
        if entry is None or entry.size != status.st_size or not is_older:
            files.copy(path, target)


def remove_file(folder: Path, name: str) -> None:
    """Remove a file of a run, here and in its store."""
    (folder / name).unlink(missing_ok=True)
    store = checkpoint_root(folder)
    if isinstance(store, RemotePath):
        files.remove(store / name)


@contextmanager
def run_lock(folder: Path) -> Iterator[int]:
    """Lock a run folder, which is made if it is missing, and yield the descriptor of the lock.

    The system releases the lock with the last process that has the descriptor, so it is never stale. Each
    role inherits the descriptor: no other launch writes to the folder while a role lives.

    Raises:
        ConfigError: another launch holds the lock, or the folder cannot be made.
    """
    path = folder / _NAME
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        make_folder(folder)
        descriptor = _acquire(path)
    except BlockingIOError as error:
        rule = "is in use by another launch; stop that one, or choose another folder"
        raise ConfigError("run.folder", rule, str(folder)) from error
    except OSError as error:
        rule = f"cannot be made: {error.strerror}; choose another folder"
        raise ConfigError("run.folder", rule, str(folder)) from error
    try:
        yield descriptor
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        with suppress(OSError):  # they are not empty: they contain a run
            for each in missing:
                each.rmdir()


def _acquire(path: Path) -> int:
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have removed the file that is locked now.
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(descriptor)):
                    return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise
        os.close(descriptor)
        time.sleep(_POLL_SECONDS)

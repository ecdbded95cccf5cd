"""A run in a store: checkpoints go there directly; what it appends to is kept in a folder here, and sent.

A store has no file to which one can add. So logs, metrics.jsonl and the like lie in a folder of this machine,
which names the store, and are sent before each checkpoint and at the end.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid.errors import HybridError, StorageError
from hybrid.storage import files
from hybrid.storage.private_files import private_user_folder, refuse_link
from hybrid.storage.remote_path import RemotePath, StoragePath, parse_path
from workers.console.messages import print_line
from workers.run_folder.run_lock import run_lock
from workers.run_folder.run_paths import run_write_errors

_STORE_FILE = ".store"  # holds the URL
_DIGITS = 12
# By how much the clocks of this machine and of the store may differ.
_CLOCKS_NS = 60_000_000_000


def checkpoint_root(folder: Path) -> StoragePath:
    """Where a run with this folder keeps its checkpoints: the store that it names, or itself.

    Raises:
        HybridError: it names a store, but this program has not made it for that store.
    """
    path = folder / _STORE_FILE
    if not os.path.lexists(path):
        return folder
    try:
        run, status = parse_path(path.read_text(encoding="utf-8")), folder.stat()
    except (OSError, ValueError) as error:
        raise HybridError(f"{path}: cannot be read: {error}; remove it") from error
    is_private = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if not isinstance(run, RemotePath) or not is_private or not folder.samefile(_folder_here(run)):
        rule = "names a store, but this folder was not made for a run in it; remove the file"
        raise HybridError(f"{path}: {rule}, or name the run by its URL")
    return run


@contextmanager
def hold_run(run: StoragePath, is_resumed: bool) -> Iterator[tuple[Path, int]]:
    """Hold the folder here of a run: itself or, of one in a store, what is sent there now and then.

    A run that goes on has its files as the store has them: whoever was at it last has sent them. What may
    have changed is sent at the end, however that comes.

    Yields:
        The folder, and the descriptor of its lock; see :func:`run_lock`.

    Raises:
        ConfigError: somebody holds it, or it cannot be made.
        StorageError: the store does not give its files, or does not take them.
    """
    if not isinstance(run, RemotePath):
        for name in ("logs", "profile"):
            refuse_link(run / name)
        with run_lock(run) as lock:
            yield run, lock
        return
    here = _folder_here(run)
    with run_lock(here) as lock:
        with run_write_errors(here):
            (here / _STORE_FILE).write_text(str(run), encoding="utf-8")
        print_line(f"logs and metrics are kept in {here}, and sent to {run} with each checkpoint")
        if is_resumed:
            _fetch(here, run)
        try:
            yield here, lock
        except BaseException as error:
            _send_after(here, error)
            raise
        upload(here)


def _folder_here(run: RemotePath) -> Path:
    digest = hashlib.sha256(str(run).encode()).hexdigest()[:_DIGITS]
    base = private_user_folder("XDG_STATE_HOME", ".local/state", "runs")
    if base is None:
        rule = "a run in a store needs a private folder on this machine"
        raise HybridError(f"{run}: {rule}; set XDG_STATE_HOME to one that only you can write to")
    return base / f"{run.name}-{digest}"


def _fetch(here: Path, store: RemotePath) -> None:
    for found in files.list_entries(store):
        if not found.is_folder:
            content = files.read_bytes(found.path)
            with run_write_errors(here):
                (here / found.path.name).write_bytes(content)


def _send_after(here: Path, error: BaseException) -> None:
    """Send what a run has left that ends with ``error``, which remains what is said."""
    try:
        upload(here)
    except StorageError as trouble:
        print_line(f"{trouble}; {here} has all of it", to_stderr=True)


def upload(here: Path) -> None:
    """Send what may have changed since the last time.

    Raises:
        StorageError: the store does not take it.
    """
    store = checkpoint_root(here)
    if not isinstance(store, RemotePath):
        return
    there = {each.path: each for each in files.list_entries(store)}
    there |= {each.path: each for each in files.list_entries(store / "logs")}
    for path in sorted(here.rglob("*")):
        within = path.relative_to(here)
        if any(part.startswith(".") for part in within.parts) or not path.is_file():
            continue
        status, sent = path.stat(), there.get(store / str(within))
        is_older = sent is not None and status.st_mtime_ns < sent.mtime_ns - _CLOCKS_NS
        if sent is None or sent.size != status.st_size or not is_older:
            files.copy(path, store / str(within))


def remove_file(here: Path, name: str) -> None:
    """Remove a file of a run, here and in its store."""
    (here / name).unlink(missing_ok=True)
    store = checkpoint_root(here)
    if isinstance(store, RemotePath):
        files.remove(store / name)

"""A run in a store: checkpoints go there directly; what it appends to is kept in a folder here, and sent.

A store has no file to which one can add. So logs, metrics.jsonl and the like lie in a folder of this machine,
which names the store, and are sent before each checkpoint and at the end.
"""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid.errors import StorageError
from hybrid.storage import files
from hybrid.storage.private_files import own_folder
from hybrid.storage.remote_path import Place, RemotePath, place
from workers.run_folder.run_lock import run_lock
from workers.run_folder.run_paths import RUNS, writing

_STORE_FILE = ".store"  # holds the URL
_DIGITS = 12
# By how much the clocks of this machine and of the store may differ.
_CLOCKS_NS = 60_000_000_000


def store_of(folder: Path) -> Place:
    """Where a run with this folder keeps its checkpoints: the store that it names, or itself."""
    path = folder / _STORE_FILE
    return place(path.read_text(encoding="utf-8")) if path.exists() else folder


@contextmanager
def held_folder(run: Place, is_resumed: bool) -> Iterator[tuple[Path, int]]:
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
        with run_lock(run) as lock:
            yield run, lock
        return
    here = _folder_here(run)
    with run_lock(here) as lock:
        with writing(here):
            (here / _STORE_FILE).write_text(str(run), encoding="utf-8")
        print(f"logs and metrics are kept in {here}, and sent to {run} with each checkpoint", flush=True)
        if is_resumed:
            _fetch(here, run)
        try:
            yield here, lock
        except BaseException as error:
            _send_after(here, error)
            raise
        send(here)


def _folder_here(run: RemotePath) -> Path:
    digest = hashlib.sha256(str(run).encode()).hexdigest()[:_DIGITS]
    base = own_folder("XDG_STATE_HOME", ".local/state", "runs") or RUNS.absolute()
    return base / f"{run.name}-{digest}"


def _fetch(here: Path, store: RemotePath) -> None:
    for found in files.entries(store):
        if not found.is_folder:
            content = files.read_bytes(found.place)
            with writing(here):
                (here / found.place.name).write_bytes(content)


def _send_after(here: Path, error: BaseException) -> None:
    """Send what a run has left that ends with ``error``, which remains what is said."""
    try:
        send(here)
    except StorageError as trouble:
        print(f"{trouble}; {here} has all of it", file=sys.stderr, flush=True)


def send(here: Path) -> None:
    """Send what may have changed since the last time.

    Raises:
        StorageError: the store does not take it.
    """
    store = store_of(here)
    if not isinstance(store, RemotePath):
        return
    there = {each.place: each for each in files.entries(store)}
    there |= {each.place: each for each in files.entries(store / "logs")}
    for path in sorted(here.rglob("*")):
        within = path.relative_to(here)
        if any(part.startswith(".") for part in within.parts) or not path.is_file():
            continue
        status, sent = path.stat(), there.get(store / str(within))
        is_older = sent is not None and status.st_mtime_ns < sent.mtime_ns - _CLOCKS_NS
        if sent is None or sent.size != status.st_size or not is_older:
            files.copy(path, store / str(within))


def drop(here: Path, name: str) -> None:
    """Remove a file of a run, here and in its store."""
    (here / name).unlink(missing_ok=True)
    store = store_of(here)
    if isinstance(store, RemotePath):
        files.remove(store / name)

"""A run in a store: checkpoints go there directly; what it appends to is kept in a folder here, and sent.

A store has no file to which one can add. So logs, metrics.jsonl and the like lie in a folder of this machine,
which names the store, and are sent before each checkpoint and at the end.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid.private_files import make_folder, own_folder
from hybrid.storage import files
from hybrid.storage.places import Place, RemotePath, place
from workers.run_folder.paths import RUNS, writing

_STORE_FILE = ".store"  # holds the URL
_DIGITS = 12
# By how much the clocks of this machine and of the store may differ.
_CLOCKS_NS = 60_000_000_000


def store_of(folder: Path) -> Place:
    """Where a run with this folder keeps its checkpoints: the store that it names, or itself."""
    path = folder / _STORE_FILE
    return place(path.read_text(encoding="utf-8")) if path.exists() else folder


@contextmanager
def folder_here(run: Place) -> Iterator[Path]:
    """The folder of this machine for a run: itself or, of one in a store, what is sent there now and then."""
    if not isinstance(run, RemotePath):
        yield run
        return
    digest = hashlib.sha256(str(run).encode()).hexdigest()[:_DIGITS]
    base = own_folder("XDG_STATE_HOME", ".local/state", "runs") or RUNS.absolute()
    here = base / f"{run.name}-{digest}"
    with writing(here):
        make_folder(here)
        (here / _STORE_FILE).write_text(str(run), encoding="utf-8")
    print(f"logs and metrics are kept in {here}, and sent to {run} with each checkpoint", flush=True)
    try:
        yield here
    finally:
        send(here)


def fetch(here: Path) -> None:
    """Have the files of a run that goes on as the store has them; whoever was at it last has sent them."""
    store = store_of(here)
    if isinstance(store, RemotePath):
        for found in files.entries(store):
            if not found.is_folder:
                with writing(here):
                    (here / found.place.name).write_bytes(files.read_bytes(found.place))


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
            files.send(path, store / str(within))


def drop(here: Path, name: str) -> None:
    """Remove a file of a run, here and in its store."""
    (here / name).unlink(missing_ok=True)
    store = store_of(here)
    if isinstance(store, RemotePath):
        files.remove(store / name)

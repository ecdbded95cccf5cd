"""Where the prepared data of a run are: on a disk that every role sees, or in a store.

In a store they are sent by the master, and read by whoever trains. The master keeps what is beside the rows
in a folder of its own, which stands for them: it names the store in one more file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from hybrid.config import DataSection, RunConfig
from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.atomic_directory import building, sent_parts
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.dataset.remote_dataset import FarData, send
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.prepare.other_hosts import Host
from hybrid.data.prepare.preparation import LOCAL_CACHE, fingerprint, prepare
from hybrid.errors import DataError
from hybrid.primitives.meter import tell_nobody
from hybrid.storage.files import exists, read_bytes, remove, write_bytes, writing
from hybrid.storage.object_stores import asking
from hybrid.storage.private_files import make_folder
from hybrid.storage.remote_path import Place, RemotePath, place

_SOURCE = "source.txt"  # in a folder that stands for data in a store: their URL
_ATTEMPT = "attempt.txt"  # in a store: which of the folders beside it is whole
_GIB = 1 << 30
_POLL_SECONDS = 0.2


def ready(
    config: RunConfig,
    cache: Place,
    tell: Callable[[str], None] = tell_nobody,
    check: Callable[[], None] = lambda: None,
    hosts: Callable[[], Sequence[Host]] = tuple,
) -> Path:
    """Make sure that the data of ``config`` are prepared, and kept in ``cache``.

    Args:
        tell, check, hosts: see :func:`prepare`.

    Returns:
        The folder they are in, or one that stands for them (see the module).

    Raises:
        ConfigError, DataError: as :func:`prepare`.
        HybridError: the store refuses.
    """
    if not isinstance(cache, RemotePath):
        return prepare(config, cache, tell, check, hosts)
    target = cache / fingerprint(config)
    kept = Path(config.data.local_cache_folder or LOCAL_CACHE, "sent")
    stand_in = kept / hashlib.blake2b(str(target).encode(), digest_size=10).hexdigest()
    with _locked(stand_in, check):
        if exists(target / _ATTEMPT):
            tell(f"prepared data found in {target}")
        else:
            with sent_parts(target) as sent:
                folder = prepare(config, kept / "prepared", tell, check, hosts, sent)
            tell(f"sending the prepared data to {target}")
            _send(folder, target, tell, check)
            # Nobody reads rows here: trainers go to the store, on this host as on any other.
            shutil.rmtree(folder, ignore_errors=True)
        if not (stand_in / dataset_manifest.FILE_NAME).exists():
            _write_stand_in(stand_in, target)
    return stand_in


def source_of(folder: Path) -> str:
    """What :func:`open_split` opens on any host: the folder, or the URL that it stands for."""
    with suppress(FileNotFoundError):
        return (folder / _SOURCE).read_text(encoding="utf-8")
    return str(folder.absolute())  # other roles may run in other folders


def open_split(source: str | Path, split: str, data: DataSection) -> PreparedDataset:
    """The split "train" or "test" of prepared data.

    Args:
        source: from :func:`ready`, or :func:`source_of`.
        data: says where rows that are fetched are kept.

    Raises:
        DataError: they are not whole, or altered.
        HybridError: they cannot be read.
    """
    where = place(source_of(Path(source)) if isinstance(source, Path) else source)
    if not isinstance(where, RemotePath):
        return PreparedDataset.open(where, split)
    folder = Path(data.local_cache_folder or tempfile.gettempdir())
    return _far_data(where).open(split, folder, int(data.local_cache_gb * _GIB))


def read_encoder(source: str) -> FeatureEncoder:
    """The encoder of prepared data; see :func:`open_split`."""
    where = place(source)
    if not isinstance(where, RemotePath):
        return FeatureEncoder.load(where)
    with tempfile.TemporaryDirectory(prefix="hybrid-") as folder:
        _far_data(where).save_files(Path(folder))
        return FeatureEncoder.load(Path(folder))


class StoreFolder:
    """A folder in a store; see :class:`hybrid.data.dataset.remote_dataset.FarFolder`."""

    def __init__(self, folder: RemotePath) -> None:
        self._folder = folder
        # A file is opened once: that alone asks the store for its size.
        self._opened = lru_cache(maxsize=None)(self._open)

    def __str__(self) -> str:
        return str(self._folder)

    def where(self, name: str) -> str:
        return str(self._folder / name)

    def read(self, name: str) -> bytes:
        try:
            return read_bytes(self._folder / name)
        except FileNotFoundError as error:
            raise DataError(f"{self}: lacks {name}; delete it, and it is prepared anew") from error

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        with asking(self._folder / name, "read"):
            data: bytes = self._opened(name).read_at(stop - start, start)
            return data

    def write(self, name: str, parts: Iterator[bytes]) -> None:
        with writing(self._folder / name) as file:
            for part in parts:
                file.write(part)

    def _open(self, name: str) -> Any:
        with asking(self._folder / name, "read") as (filesystem, path):
            return filesystem.open_input_file(path)


def _send(folder: Path, target: RemotePath, tell: Callable[[str], None], check: Callable[[], None]) -> None:
    """Send prepared data under a name of this attempt's own, and then say that it is the one that counts.

    So two that send at once leave two whole ones, and never one mixed; the last word counts.
    """
    attempt = uuid.uuid4().hex
    try:
        send(folder, StoreFolder(target / attempt), tell, check)
        write_bytes(target / _ATTEMPT, attempt.encode())
    except BaseException:
        with suppress(OSError):
            remove(target / attempt)
        raise


def _far_data(target: RemotePath) -> FarData:
    try:
        attempt = read_bytes(target / _ATTEMPT).decode()
    except FileNotFoundError as error:
        raise DataError(f"{target}: holds no prepared data any more; start anew") from error
    return FarData(StoreFolder(target / attempt))


def _write_stand_in(folder: Path, target: RemotePath) -> None:
    with building(folder, dataset_manifest.FILE_NAME) as partial:
        _far_data(target).save_files(partial)
        (partial / _SOURCE).write_text(str(target), encoding="utf-8")


@contextmanager
def _locked(stand_in: Path, check: Callable[[], None]) -> Iterator[None]:
    """Have one process of this machine at a time send the data that ``stand_in`` stands for."""
    make_folder(stand_in.parent)
    descriptor = os.open(stand_in.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not _has_locked(descriptor):
            check()  # which ends it where the run has ended
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _has_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

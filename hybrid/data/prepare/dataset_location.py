"""The location of a run's prepared data: a disk that every role sees, or an object store.

The master sends data to a store, and trainers read them there. The master keeps the files beside the rows in
a local folder, the stand-in. One more file in the stand-in holds the URL.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hybrid.config import DataSection, RunConfig
from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.atomic_directory import build_directory, lock_beside
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.dataset.remote_dataset import RemoteDataset, StoreFolder, send
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.data.prepare.preparation import LOCAL_CACHE, fingerprint, prepare
from hybrid.errors import DataError
from hybrid.primitives.progress import ignore_progress
from hybrid.storage.files import exists, read_bytes, remove, write_bytes
from hybrid.storage.private_files import make_folder
from hybrid.storage.remote_path import RemotePath, StoragePath, parse_path

_SOURCE = "source.txt"  # in a stand-in: the URL of the data
_ATTEMPT = "attempt.txt"  # in a store: the name of the complete folder beside it
_GIB = 1 << 30
_POLL_SECONDS = 0.2


def ensure_prepared(
    config: RunConfig,
    cache: StoragePath,
    report: Callable[[str], None] = ignore_progress,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Make sure that the data of ``config`` are prepared and stored in ``cache``.

    Args:
        report, check: see :func:`prepare`.

    Returns:
        Their folder, or its stand-in.

    Raises:
        ConfigError, DataError: as :func:`prepare`.
        HybridError: the store refuses.
    """
    if not isinstance(cache, RemotePath):
        return prepare(config, cache, report, check)
    target = cache / fingerprint(config)
    local = Path(config.data.local_cache_folder or LOCAL_CACHE, "sent")
    stand_in = local / hashlib.blake2b(str(target).encode(), digest_size=10).hexdigest()
    make_folder(stand_in.parent)
    while True:  # one process of this machine at a time sends the data
        with suppress(BlockingIOError):
            lock = lock_beside(stand_in, wait=False)
            break
        check()
        time.sleep(_POLL_SECONDS)
    try:
        if exists(target / _ATTEMPT):
            report(f"prepared data found in {target}")
        else:
            folder = prepare(config, local / "prepared", report, check)
            report(f"sending the prepared data to {target}")
            # Two masters that send at the same time leave two complete folders, and the later name is valid.
            attempt = uuid.uuid4().hex
            try:
                send(folder, StoreFolder(target / attempt), report, check)
                write_bytes(target / _ATTEMPT, attempt.encode())
            except BaseException:
                with suppress(OSError):
                    remove(target / attempt)
                raise
            shutil.rmtree(folder, ignore_errors=True)  # all trainers read from the store
        if not (stand_in / dataset_manifest.FILE_NAME).exists():
            with build_directory(stand_in, dataset_manifest.FILE_NAME) as partial:
                _open_remote(target).save_files(partial)
                (partial / _SOURCE).write_text(str(target), encoding="utf-8")
    finally:
        os.close(lock)
    return stand_in


def source_of(folder: Path) -> str:
    """Return what :func:`open_split` opens on any host: the folder, or the URL of a stand-in."""
    with suppress(FileNotFoundError):
        return (folder / _SOURCE).read_text(encoding="utf-8")
    return str(folder.absolute())  # other roles may have other working directories


def open_split(source: str | Path, split: str, data: DataSection) -> PreparedDataset:
    """Open the split "train" or "test" of prepared data.

    Args:
        source: from :func:`ensure_prepared`, or :func:`source_of`.
        data: names the folder of rows that are fetched.

    Raises:
        DataError: the data are incomplete, or altered.
        HybridError: the data cannot be read.
    """
    path = parse_path(source_of(Path(source)) if isinstance(source, Path) else source)
    if not isinstance(path, RemotePath):
        return PreparedDataset.open(path, split)
    folder = Path(data.local_cache_folder or tempfile.gettempdir())
    return _open_remote(path).open(split, folder, int(data.local_cache_gb * _GIB))


def read_encoder(source: str) -> FeatureEncoder:
    """Return the encoder of prepared data; see :func:`open_split`."""
    path = parse_path(source)
    if not isinstance(path, RemotePath):
        return FeatureEncoder.load(path)
    with tempfile.TemporaryDirectory(prefix="hybrid-") as folder:
        _open_remote(path).save_files(Path(folder))
        return FeatureEncoder.load(Path(folder))


def _open_remote(target: RemotePath) -> RemoteDataset:
    try:
        attempt = read_bytes(target / _ATTEMPT).decode()
    except FileNotFoundError as error:
        raise DataError(f"{target}: holds no prepared data any more; start anew") from error
    return RemoteDataset(StoreFolder(target / attempt))

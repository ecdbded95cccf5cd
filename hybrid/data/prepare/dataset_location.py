"""The location of a run's prepared data: a folder that every trainer can read, or an object store.

With a store, the master prepares the data in a local folder and sends them; other hosts fetch them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hybrid.config import DataSection, RunConfig
from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.atomic_directory import hold_lock
from hybrid.data.dataset.dataset_manifest import DataManifest
from hybrid.data.dataset.prepared_dataset import PreparedDataset
from hybrid.data.dataset.remote_dataset import altered_error, fetch_dataset, send_dataset
from hybrid.data.encode.feature_encoder import FILE_NAME as FEATURES
from hybrid.data.prepare.preparation import LOCAL_CACHE, fingerprint, prepare
from hybrid.primitives.progress import ignore_progress
from hybrid.storage.files import compute_checksum, read_text, remove, write_bytes
from hybrid.storage.remote_path import RemotePath, StoragePath, parse_path

_ATTEMPT = "attempt.txt"  # in a store: the name of the complete folder beside it


def ensure_prepared(
    config: RunConfig,
    cache: StoragePath,
    report: Callable[[str], None] = ignore_progress,
    check: Callable[[], None] = lambda: None,
) -> StoragePath:
    """Make sure that the data of ``config`` are prepared and stored in ``cache``; return their folder.

    Args:
        report, check: see :func:`prepare`.

    Raises:
        ConfigError, DataError: as :func:`prepare`.
        HybridError: the store refuses a request.
    """
    if not isinstance(cache, RemotePath):
        return prepare(config, cache, report, check)
    target = cache / fingerprint(config)
    local = _local_cache(config.data)
    with hold_lock(local / f"{target.name}.sending", check):  # one process of this machine sends the data
        with suppress(FileNotFoundError):
            folder = target / read_text(target / _ATTEMPT)
            manifest = DataManifest.read(folder / dataset_manifest.FILE_NAME)
            if compute_checksum(folder / FEATURES) != manifest.stored[FEATURES].whole:
                raise altered_error(folder / FEATURES)
            report(f"prepared data found in {target}")
            return folder
        prepared = prepare(config, local, report, check)
        report(f"sending the prepared data to {target}")
        # Two masters that send at the same time leave two complete folders; the name that is written last is
        # valid.
        folder = target / uuid.uuid4().hex
        try:
            send_dataset(prepared, folder, report, check)
            write_bytes(target / _ATTEMPT, folder.name.encode())
        except BaseException:
            with suppress(OSError):
                remove(folder)
            raise
    return folder


def open_split(source: str | StoragePath, split: str, data: DataSection) -> PreparedDataset:
    """Open the split "train", "validation" or "test" of prepared data.

    Args:
        source: the folder that :func:`ensure_prepared` returned, or its absolute path or URL.
        data: the section with the local folder for data of a store.

    Raises:
        DataError: the data are incomplete or altered, or the local folder cannot be written.
        HybridError: the data cannot be read.
    """
    path = parse_path(source)
    if isinstance(path, RemotePath):
        path = fetch_dataset(path, _local_cache(data))
    return PreparedDataset.open(path, split)


def _local_cache(data: DataSection) -> Path:
    return Path(data.local_cache_folder or LOCAL_CACHE)

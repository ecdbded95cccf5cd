"""A prepared data set in an object store: the files of a folder (prepared_dataset.py).

::

    CACHE/FINGERPRINT/attempt.txt   the name of the complete attempt; written last
    CACHE/FINGERPRINT/ATTEMPT/...   the files

A host fetches all files once, into a folder that its trainers share.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.atomic_directory import build_directory, hold_lock
from hybrid.data.dataset.dataset_manifest import DataManifest
from hybrid.errors import DataError, StorageError
from hybrid.primitives.progress import Progress, ignore_progress
from hybrid.storage.files import compute_checksum, copy, open_writer, read_blocks
from hybrid.storage.private_files import make_folder
from hybrid.storage.remote_path import RemotePath


def altered_error(path: RemotePath) -> DataError:
    return DataError(f"{path}: altered since it was prepared; delete its folder")


def send_dataset(
    folder: Path,
    target: RemotePath,
    report: Callable[[str], None] = ignore_progress,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Send a prepared data set to a store.

    Args:
        report: receives progress, one line at a time.
        check: called between blocks; an exception from it ends the transfer.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    total, done = sum(path.stat().st_size for path in paths), 0
    progress = Progress(report, f"sending {target}")
    for path in paths:
        with open_writer(target / str(path.relative_to(folder))) as file:
            for block in read_blocks(path):
                check()
                file.write(block)
                done += len(block)
                progress.add(0, done / total)


def fetch_dataset(source: RemotePath, cache: Path) -> Path:
    """Return the folder of this host with a data set from a store, which is fetched if it is missing.

    If several processes need it at the same time, one fetches it, and the others wait.

    Args:
        source: the folder of an attempt in the store.

    Raises:
        DataError: the data set is incomplete or altered, or the folder cannot be written.
        StorageError: the store rejects a request.
    """
    target = cache / source.parent.name
    if target.exists():
        return target
    try:
        with hold_lock(target, lambda: None):
            if not target.exists():
                with build_directory(target) as folder:
                    _fetch(source, folder)
    except StorageError:
        raise
    except FileNotFoundError as error:
        raise DataError(
            f"{source}: a file is missing ({error}); delete the folder to prepare again"
        ) from error
    except OSError as error:
        reason = error.strerror or error
        rule = "free space there, or set data.local_cache_folder to another folder of this host"
        raise DataError(f"{cache}: cannot hold prepared data: {reason}; {rule}") from error
    return target


def _fetch(source: RemotePath, folder: Path) -> None:
    """Fetch the files that an interrupted attempt has not fetched into ``folder``."""
    for name, file in DataManifest.read(source / dataset_manifest.FILE_NAME).stored.items():
        path = folder / name
        make_folder(path.parent)
        if not path.exists() or compute_checksum(path) != file.whole:
            copy(source / name, path)
            if compute_checksum(path) != file.whole:
                raise altered_error(source / name)
    copy(source / dataset_manifest.FILE_NAME, folder / dataset_manifest.FILE_NAME)

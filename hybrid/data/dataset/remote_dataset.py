"""A prepared data set in an object store: its files, and how they are sent and opened.

::

    CACHE/FINGERPRINT/ATTEMPT/        a file beside it names the valid attempt (dataset_location.py)
      features.json and others        all files beside the splits of a folder (prepared_dataset.py)
      train/samples, samples.index    the rows in chunks (chunk_index.py)
      train/weights, weights.index    if samples have weights
      train/source_rows               int64, the input row of each sample
      test/...
      chunks.json                     checksums of all of these but the chunks; written last
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.chunk_cache import ChunkCache
from hybrid.data.dataset.chunk_index import (
    SAMPLES,
    WEIGHTS,
    ChunkArray,
    ChunkIndex,
    ChunkLayout,
)
from hybrid.data.dataset.dataset_manifest import DataManifest
from hybrid.data.dataset.fetched_split import FetchedDataset
from hybrid.data.dataset.prepared_dataset import map_arrays
from hybrid.data.dataset.sample_order import CHUNK_ROWS
from hybrid.errors import DataError
from hybrid.primitives.progress import Progress, ignore_progress
from hybrid.storage.files import open_writer, read_bytes
from hybrid.storage.object_stores import store_request
from hybrid.storage.remote_path import RemotePath

FILE_NAME = "chunks.json"
FORMAT_VERSION = 1
INDEX, SOURCE_ROWS = ".index", "source_rows"
_BLOCK_ROWS, _BLOCK_BYTES = 1 << 20, 8 << 20  # that are sent at a time
_TARGETS = ("labels", "weights", "groups")
_TEST_FRACTION = 1 / 8  # of data.local_cache_gb
_WEIGHTS_FRACTION = 1 / 8  # of the cache of a split


class StoreFolder:
    """A folder of an object store; its methods raise HybridError if the store refuses."""

    def __init__(self, folder: RemotePath) -> None:
        self._folder = folder

        @cache  # opening a file requests its size
        def open_file(name: str) -> pa.NativeFile:
            with store_request(folder / name, "read") as (filesystem, path):
                return filesystem.open_input_file(path)

        self._open = open_file

    def __str__(self) -> str:
        return str(self._folder)

    def url(self, name: str) -> str:
        """Return the URL of a file."""
        return str(self._folder / name)

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        try:
            return read_bytes(self._folder / name)
        except FileNotFoundError as error:
            raise DataError(f"{self}: lacks {name}; delete it, and it is prepared anew") from error

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return some bytes of a file."""
        with store_request(self._folder / name, "read"):
            data: bytes = self._open(name).read_at(stop - start, start)
            return data

    def write(self, name: str, blocks: Iterator[bytes]) -> None:
        """Write a file, which appears once it is complete."""
        with open_writer(self._folder / name) as file:
            for block in blocks:
                file.write(block)


def send(
    folder: Path,
    remote: StoreFolder,
    report: Callable[[str], None] = ignore_progress,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Send a prepared data set to a store.

    Args:
        report: receives progress, one line at a time.
        check: called between chunks; what it raises ends the transfer.

    Raises:
        HybridError: it cannot be sent.
    """
    manifest = DataManifest.read(folder / dataset_manifest.FILE_NAME)
    checksums: dict[str, str] = {}
    targets: dict[str, list[ChunkArray]] = {}

    def write(name: str, blocks: Iterable[bytes]) -> None:
        digest = hashlib.sha256()

        def digested() -> Iterator[bytes]:
            for block in blocks:
                digest.update(block)
                yield block

        remote.write(name, digested())
        checksums[name] = digest.hexdigest()

    for split, split_report in manifest.splits.items():
        arrays, num_rows = map_arrays(folder / split), split_report.num_rows
        targets[split] = [
            ChunkArray(n, arrays[n].dtype, arrays[n].shape[1:]) for n in _TARGETS if n in arrays
        ]
        for name, layout in _layouts(manifest, targets[split]).items():
            path = f"{split}/{name}"
            progress = Progress(report, f"sending {remote.url(path)}")
            index = ChunkIndex.of(arrays, layout, num_rows)
            remote.write(path, _chunks(arrays, layout, num_rows, index, progress, check))
            write(path + INDEX, [index.table.tobytes()])
        rows = arrays[SOURCE_ROWS]
        write(
            f"{split}/{SOURCE_ROWS}",
            (rows[start : start + _BLOCK_ROWS].tobytes() for start in range(0, len(rows), _BLOCK_ROWS)),
        )
    for file in sorted(each for each in folder.iterdir() if each.is_file()):
        with file.open("rb") as opened:
            write(file.name, iter(partial(opened.read, _BLOCK_BYTES), b""))
    described = {
        split: [[name, dtype.str, list(shape)] for name, dtype, shape, *_ in of_split]
        for split, of_split in targets.items()
    }
    content = {"format": FORMAT_VERSION, "arrays": described, "checksums": checksums}
    remote.write(FILE_NAME, iter([json.dumps(content, indent=1).encode()]))


def _chunks(
    arrays: dict[str, npt.NDArray[Any]],
    layout: ChunkLayout,
    num_rows: int,
    index: ChunkIndex,
    progress: Progress,
    check: Callable[[], None],
) -> Iterator[bytes]:
    for chunk in range(index.num_chunks):
        check()
        data = layout.pack(arrays, chunk, num_rows)
        index.add(chunk, data)
        yield data
        progress.add(min(CHUNK_ROWS, num_rows - chunk * CHUNK_ROWS))


def _layouts(manifest: DataManifest, targets: list[ChunkArray]) -> dict[str, ChunkLayout]:
    """Return the layouts of the files of chunks of a split, by the names of the files."""
    layouts = {SAMPLES: ChunkLayout.of_samples(manifest.input_spec, targets)}
    if weights := tuple(each for each in targets if each.name == "weights"):
        layouts[WEIGHTS] = ChunkLayout(weights, ())
    return layouts


class RemoteDataset:
    """A prepared data set in a store.

    Raises:
        DataError: it is incomplete, or altered.
        HybridError: it cannot be read.
    """

    def __init__(self, remote: StoreFolder) -> None:
        self._remote = remote
        try:
            content = json.loads(remote.read(FILE_NAME))
            if content["format"] != FORMAT_VERSION:
                raise DataError(f"{remote}: made by another version of this program; delete it")
            self._checksums: dict[str, str] = dict(content["checksums"])
            self._targets = {
                split: [ChunkArray(name, np.dtype(kind), tuple(shape)) for name, kind, shape in arrays]
                for split, arrays in content["arrays"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{remote.url(FILE_NAME)}: cannot be read ({error!r}); delete {remote}"
            ) from error
        self.manifest = DataManifest.parse(
            self.file(dataset_manifest.FILE_NAME), remote.url(dataset_manifest.FILE_NAME)
        )

    def file(self, name: str) -> bytes:
        """Return the content of a file without chunks."""
        data = self._remote.read(name)
        if hashlib.sha256(data).hexdigest() != self._checksums.get(name):
            raise DataError(f"{self._remote.url(name)}: altered since it was prepared; delete {self._remote}")
        return data

    def save_files(self, folder: Path) -> None:
        """Write the files beside the splits into a local folder."""
        for name in self._checksums:
            if "/" not in name:
                (folder / name).write_bytes(self.file(name))

    def open(self, split: str, folder: Path, num_bytes: int) -> FetchedDataset:
        """Open a split.

        Args:
            folder: of the rows that are fetched.
            num_bytes: that the rows of all splits may take.
        """
        if split not in self._targets:
            raise DataError(f"{self._remote.url(dataset_manifest.FILE_NAME)}: has no split {split}")
        report = self.manifest.splits[split]
        fraction = _TEST_FRACTION if split == "test" else 1 - _TEST_FRACTION
        layouts = _layouts(self.manifest, self._targets[split])
        fractions = {SAMPLES: fraction}
        if WEIGHTS in layouts:
            fractions = {
                SAMPLES: fraction * (1 - _WEIGHTS_FRACTION),
                WEIGHTS: fraction * _WEIGHTS_FRACTION,
            }
        caches: dict[str, ChunkCache] = {}
        indices: dict[str, ChunkIndex] = {}
        for name, layout in layouts.items():
            path = f"{split}/{name}"
            url = self._remote.url(path)
            index = ChunkIndex.read(self.file(path + INDEX), layout, report.num_rows, url + INDEX)
            fetch = partial(self._remote.read_range, path)
            room = int(num_bytes * fractions[name])
            caches[name] = ChunkCache(fetch, url, layout, index, report.num_rows, folder, room)
            indices[name] = index
        return FetchedDataset(
            caches[SAMPLES],
            caches.get(WEIGHTS),
            fractions[SAMPLES],
            indices[SAMPLES].total_ids,
            lambda: np.frombuffer(self.file(f"{split}/{SOURCE_ROWS}"), np.int64),
            self.manifest.input_spec,
            report,
        )

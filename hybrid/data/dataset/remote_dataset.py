"""A prepared data set that lies elsewhere: how it is laid out there, and opened.

::

    CACHE/FINGERPRINT/ATTEMPT/        which attempt counts, a file beside it says (dataset_location.py)
      features.json and the like      all files beside the splits of a folder (prepared_dataset.py)
      train/samples, samples.index    the rows in chunks (hybrid/data/dataset/chunk_index.py)
      train/weights, weights.index    where samples have weights
      train/source_rows               int64, where the samples came from
      test/...
      chunks.json                     checksums of all of these but the chunks; written last
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.chunk_cache import Residence
from hybrid.data.dataset.chunk_index import (
    SAMPLES,
    WEIGHTS,
    ChunkArray,
    ChunkIndex,
    ChunkLayout,
    IndexBuilder,
)
from hybrid.data.dataset.dataset_manifest import DataManifest
from hybrid.data.dataset.fetched_split import FetchedDataset
from hybrid.data.dataset.prepared_dataset import map_arrays
from hybrid.data.dataset.sample_order import CHUNK_ROWS
from hybrid.errors import DataError
from hybrid.primitives.meter import Meter, tell_nobody

FILE_NAME = "chunks.json"
FORMAT_VERSION = 1
INDEX, SOURCE_ROWS = ".index", "source_rows"
_BLOCK_ROWS, _BLOCK_BYTES = 1 << 20, 8 << 20  # that are sent at a time
_TARGETS = ("labels", "weights", "groups")
_TEST_SHARE = 1 / 8  # of the room for what is fetched
_WEIGHTS_SHARE = 1 / 8  # of that of a split


class FarFolder(Protocol):
    """Where a data set lies, by names with slashes; its text says where that is.

    Every method raises HybridError where something cannot be had, or be written.
    """

    def where(self, name: str) -> str:
        """What a file is called in messages."""
        ...

    def read(self, name: str) -> bytes:
        """All of a file."""
        ...

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Some bytes of one."""
        ...

    def write(self, name: str, parts: Iterator[bytes]) -> None:
        """Write a file, which is there once it is whole."""
        ...


class _FarFile:
    """A file in a folder; see :class:`hybrid.data.dataset.chunk_cache.FarFile`."""

    def __init__(self, folder: FarFolder, name: str) -> None:
        self._folder, self._name = folder, name

    def __str__(self) -> str:
        return self._folder.where(self._name)

    def read_range(self, start: int, stop: int) -> bytes:
        return self._folder.read_range(self._name, start, stop)


def send(
    folder: Path,
    far: FarFolder,
    tell: Callable[[str], None] = tell_nobody,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Send a prepared data set, whose folder is whole, elsewhere.

    Args:
        tell: told every now and then how far it is.
        check: called between chunks; what it raises ends it.

    Raises:
        HybridError: it cannot be sent.
    """
    description = DataManifest.read(folder / dataset_manifest.FILE_NAME)
    checksums: dict[str, str] = {}
    targets: dict[str, list[ChunkArray]] = {}

    def write(name: str, parts: Iterable[bytes]) -> None:
        digest = hashlib.sha256()
        far.write(name, _digested(parts, digest))
        checksums[name] = digest.hexdigest()

    for split, report in description.splits.items():
        arrays = map_arrays(folder / split)
        targets[split] = [
            ChunkArray(n, arrays[n].dtype, arrays[n].shape[1:]) for n in _TARGETS if n in arrays
        ]
        for name, layout in _layouts(description, targets[split]).items():
            path = f"{split}/{name}"
            index = IndexBuilder(arrays, layout, report.num_rows)
            meter = Meter(f"sending {far.where(path)}", tell)
            far.write(path, _chunks(arrays, layout, report.num_rows, index, meter, check))
            write(path + INDEX, [index.stored()])
        write(f"{split}/{SOURCE_ROWS}", _blocks(arrays[SOURCE_ROWS]))
    for file in sorted(each for each in folder.iterdir() if each.is_file()):
        with file.open("rb") as opened:
            write(file.name, iter(partial(opened.read, _BLOCK_BYTES), b""))
    described = {
        split: [[name, dtype.str, list(shape)] for name, dtype, shape, *_ in of_split]
        for split, of_split in targets.items()
    }
    content = {"format": FORMAT_VERSION, "arrays": described, "checksums": checksums}
    far.write(FILE_NAME, iter([json.dumps(content, indent=1).encode()]))


def _chunks(
    arrays: dict[str, npt.NDArray[Any]],
    layout: ChunkLayout,
    num_rows: int,
    index: IndexBuilder,
    meter: Meter,
    check: Callable[[], None],
) -> Iterator[bytes]:
    for chunk in range(-(-num_rows // CHUNK_ROWS)):
        check()
        data = layout.pack(arrays, chunk, num_rows)
        index.add(chunk, data)
        yield data
        meter.add(min(CHUNK_ROWS, num_rows - chunk * CHUNK_ROWS))


def _blocks(values: npt.NDArray[Any]) -> Iterator[bytes]:
    for start in range(0, len(values), _BLOCK_ROWS):
        yield values[start : start + _BLOCK_ROWS].tobytes()


def _digested(parts: Iterable[bytes], digest: hashlib._Hash) -> Iterator[bytes]:
    for part in parts:
        digest.update(part)
        yield part


def _layouts(description: DataManifest, targets: list[ChunkArray]) -> dict[str, ChunkLayout]:
    """The files of chunks of a split, by their names."""
    layouts = {SAMPLES: ChunkLayout.of_samples(description.input_spec, targets)}
    if weights := tuple(each for each in targets if each.name == "weights"):
        layouts[WEIGHTS] = ChunkLayout(weights, ())
    return layouts


class FarData:
    """A prepared data set that was sent elsewhere.

    Raises:
        DataError: it is not whole, or altered.
        HybridError: it cannot be read.
    """

    def __init__(self, far: FarFolder) -> None:
        self._far = far
        try:
            content = json.loads(far.read(FILE_NAME))
            if content["format"] != FORMAT_VERSION:
                raise DataError(f"{far}: made by another version of this program; delete it")
            self._checksums: dict[str, str] = dict(content["checksums"])
            self._targets = {
                split: [ChunkArray(name, np.dtype(kind), tuple(shape)) for name, kind, shape in arrays]
                for split, arrays in content["arrays"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{far.where(FILE_NAME)}: cannot be read ({error!r}); delete {far}") from error
        self.manifest = DataManifest.parse(
            self.file(dataset_manifest.FILE_NAME), far.where(dataset_manifest.FILE_NAME)
        )

    def file(self, name: str) -> bytes:
        """One that is no file of chunks."""
        data = self._far.read(name)
        if hashlib.sha256(data).hexdigest() != self._checksums.get(name):
            raise DataError(f"{self._far.where(name)}: altered since it was prepared; delete {self._far}")
        return data

    def save_files(self, folder: Path) -> None:
        """Write the files beside the splits into a folder that is there."""
        for name in self._checksums:
            if "/" not in name:
                (folder / name).write_bytes(self.file(name))

    def open(self, split: str, folder: Path, num_bytes: int) -> FetchedDataset:
        """A split of it.

        Args:
            folder: where rows that are fetched are kept.
            num_bytes: that they may take, those of all splits together.
        """
        if split not in self._targets:
            raise DataError(f"{self._far.where(dataset_manifest.FILE_NAME)}: has no split {split}")
        report = self.manifest.splits[split]
        share = _TEST_SHARE if split == "test" else 1 - _TEST_SHARE
        layouts = _layouts(self.manifest, self._targets[split])
        shares = {SAMPLES: share, WEIGHTS: 0.0}
        if WEIGHTS in layouts:
            shares = {SAMPLES: share * (1 - _WEIGHTS_SHARE), WEIGHTS: share * _WEIGHTS_SHARE}
        residences: dict[str, Residence] = {}
        indices: dict[str, ChunkIndex] = {}
        for name, layout in layouts.items():
            path = f"{split}/{name}"
            stored = self.file(path + INDEX)
            index = ChunkIndex.read(stored, layout, report.num_rows, self._far.where(path + INDEX))
            room = int(num_bytes * shares[name])
            file = _FarFile(self._far, path)
            residences[name] = Residence(file, layout, index, report.num_rows, folder, room)
            indices[name] = index
        return FetchedDataset(
            residences[SAMPLES],
            residences.get(WEIGHTS),
            shares[SAMPLES],
            indices[SAMPLES].total_ids,
            lambda: np.frombuffer(self.file(f"{split}/{SOURCE_ROWS}"), np.int64),
            self.manifest.input_spec,
            report,
        )

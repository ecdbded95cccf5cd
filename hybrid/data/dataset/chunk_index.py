"""The file format of a split in chunks of rows, each of which can be read alone.

The arrays of prepared_dataset.py hold a split column by column; some rows would be one range of each. Here a
chunk of 4096 rows (those of sample_order.py) is one range of one file::

    samples          | chunk 0                                            | chunk 1 ...
                     | dense | ids | labels | bag_0 offsets | bag_0 ids |
    samples.index    the start of each chunk, its checksum, and the start of the ids of its bags

``weights`` holds the weights of the samples once more, since every trainer needs those of the whole step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybrid.data.dataset.sample_order import CHUNK_ROWS
from hybrid.errors import DataError
from hybrid.input_spec import InputSpec

SAMPLES, WEIGHTS = "samples", "weights"
_CHECKSUM_WORDS = 4  # of 64 bits: SHA-256
_FIRST_BAG = 1 + _CHECKSUM_WORDS  # column of the index


class ChunkArray(NamedTuple):
    """An array of a split, of which each chunk has a slice.

    Attributes:
        name: as in hybrid/data/dataset/prepared_dataset.py.
        dtype, row_shape: of its rows.
        bag: the number of the bag whose ids, or weights, it holds; None if it has a row for each sample.
        is_offsets: whether it holds the offsets of a bag; each chunk has one more, and its first is 0.
    """

    name: str
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    bag: int | None = None
    is_offsets: bool = False

    @property
    def row_bytes(self) -> int:
        return int(self.dtype.itemsize * np.prod(self.row_shape, dtype=np.int64))


@dataclass(frozen=True)
class ChunkLayout:
    """The arrays of a file of chunks, in their order within a chunk.

    Attributes:
        bags: the multi-hot features, by their numbers in the names of the arrays.
    """

    arrays: tuple[ChunkArray, ...]
    bags: tuple[int, ...]

    @classmethod
    def of_samples(cls, spec: InputSpec, targets: Sequence[ChunkArray]) -> ChunkLayout:
        """Return the layout of all arrays that :meth:`PreparedDataset.gather` reads.

        Args:
            targets: labels, and weights and groups, if there are any.
        """
        features = spec.sparse_features
        bags = tuple(k for k, feature in enumerate(features) if feature.multi_hot)
        arrays = [
            ChunkArray("dense", np.dtype(np.float32), (len(spec.dense_features),)),
            ChunkArray("ids", np.dtype(np.int32), (len(features) - len(bags),)),
            *targets,
        ]
        for number, k in enumerate(bags):
            arrays.append(ChunkArray(f"bag_{k}_offsets", np.dtype(np.int64), (), is_offsets=True))
            arrays.append(ChunkArray(f"bag_{k}_ids", np.dtype(np.int32), (), number))
            if features[k].weighted:
                arrays.append(ChunkArray(f"bag_{k}_weights", np.dtype(np.float32), (), number))
        return cls(tuple(arrays), bags)

    def pack(self, arrays: Mapping[str, npt.NDArray[Any]], chunk: int, num_rows: int) -> bytes:
        """Return the bytes of a chunk of a split of ``num_rows``."""
        start, stop = chunk * CHUNK_ROWS, min((chunk + 1) * CHUNK_ROWS, num_rows)
        slices = []
        for array in self.arrays:
            values = arrays[array.name]
            if array.bag is not None:
                offsets = arrays[f"bag_{self.bags[array.bag]}_offsets"]
                rows = values[offsets[start] : offsets[stop]]
            elif array.is_offsets:
                rows = values[start : stop + 1] - values[start]
            else:
                rows = values[start:stop]
            slices.append(np.ascontiguousarray(rows, array.dtype).tobytes())
        return b"".join(slices)

    def unpack(
        self, data: memoryview, num_rows: int, num_ids: Sequence[int]
    ) -> Iterator[tuple[ChunkArray, npt.NDArray[Any]]]:
        """Yield the slice of each array in a chunk.

        Args:
            num_rows: of the chunk.
            num_ids: of each bag in the chunk.
        """
        at = 0
        for array in self.arrays:
            count = num_rows + array.is_offsets if array.bag is None else num_ids[array.bag]
            size = count * array.row_bytes
            yield array, np.frombuffer(data[at : at + size], array.dtype).reshape(count, *array.row_shape)
            at += size


class ChunkIndex:
    """The positions and checksums of the chunks of a file.

    Args:
        table: int64 (C + 1, 5 + K) for C chunks and K bags: the first byte of each chunk, its SHA-256 in four
            words, and the first id of each of its bags; the last line has the ends.
    """

    def __init__(self, table: npt.NDArray[np.int64]) -> None:
        self.table = table
        self.num_chunks = len(table) - 1

    @classmethod
    def of(cls, arrays: Mapping[str, npt.NDArray[Any]], layout: ChunkLayout, num_rows: int) -> ChunkIndex:
        """Return the index of a split, to which its chunks are added while they are written."""
        starts = np.append(np.arange(0, num_rows, CHUNK_ROWS), num_rows)
        table = np.zeros((len(starts), _FIRST_BAG + len(layout.bags)), np.int64)
        for number, k in enumerate(layout.bags):
            table[:, _FIRST_BAG + number] = arrays[f"bag_{k}_offsets"][starts]
        return cls(table)

    def add(self, chunk: int, data: bytes) -> None:
        """Add the next chunk."""
        self.table[chunk, 1:_FIRST_BAG] = _checksum(data)
        self.table[chunk + 1, 0] = self.table[chunk, 0] + len(data)

    @classmethod
    def read(cls, stored: bytes, layout: ChunkLayout, num_rows: int, name: str) -> ChunkIndex:
        """Parse the bytes of a table; DataError if it is of another split."""
        table = np.frombuffer(stored, np.int64)
        shape = (-(-num_rows // CHUNK_ROWS) + 1, _FIRST_BAG + len(layout.bags))
        if table.size != shape[0] * shape[1]:
            raise DataError(f"{name}: is not an index of {num_rows:,} rows")
        return cls(table.reshape(shape))

    @cached_property
    def edges(self) -> list[int]:
        """The first byte of each chunk, and the end of the last."""
        edges: list[int] = self.table[:, 0].tolist()
        return edges

    @property
    def total_ids(self) -> list[int]:
        """The number of ids of each bag."""
        ids: list[int] = self.table[-1, _FIRST_BAG:].tolist()
        return ids

    @property
    def most_ids(self) -> list[int]:
        """The largest number of ids of each bag in a chunk."""
        most: list[int] = np.diff(self.table[:, _FIRST_BAG:], axis=0).max(0, initial=0).tolist()
        return most

    def num_ids(self, chunk: int) -> list[int]:
        """Return the number of ids of each bag in a chunk."""
        found: list[int] = (self.table[chunk + 1] - self.table[chunk])[_FIRST_BAG:].tolist()
        return found

    def fits(self, chunk: int, data: memoryview) -> bool:
        """Return whether these are the bytes of a chunk, by its checksum."""
        return bool((_checksum(data) == self.table[chunk, 1:_FIRST_BAG]).all())


def _checksum(data: bytes | memoryview) -> npt.NDArray[np.int64]:
    return np.frombuffer(hashlib.sha256(data).digest(), np.int64)

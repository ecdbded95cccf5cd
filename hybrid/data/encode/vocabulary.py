"""Vocabularies, which are the known values of categorical columns, and their Parquet file.

In memory, a value takes the bytes of its text and 20 more: 8 for the offset of the text, and 12 for its
64-bit hash and the index. If hashes are equal, texts are compared.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hybrid.data.parse.parquet_blocks import MAX_VALUES_PER_BYTE, check_claimed_sizes
from hybrid.errors import DataError
from hybrid.primitives.splitmix64 import splitmix64
from hybrid.storage.file_formats import parse_json
from hybrid.storage.files import compute_checksum, local_copy
from hybrid.storage.remote_path import StoragePath

_COLUMN, _SIZES = "value", b"sizes"
_GROUP_ROWS = 1 << 20
# Pages with other encodings can repeat values, so a small file could expand to gigabytes.
_ENCODINGS = {"DELTA_LENGTH_BYTE_ARRAY", "PLAIN", "RLE", "BIT_PACKED"}
_EMPTY = pa.array([], pa.large_string())
HASHED_AT_ONCE = 1 << 16
_FACTORS = splitmix64(np.arange(4096, dtype=np.uint64)) | np.uint64(1)


class Vocabulary:
    """Distinct texts in an order: an array without null."""

    def __init__(self, texts: pa.Array) -> None:
        self.texts = texts if texts.type == pa.large_string() else texts.cast(pa.large_string())

    @classmethod
    def of(cls, texts: Iterable[str]) -> Vocabulary:
        return cls(pa.array([*texts], pa.large_string()))

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts.to_pylist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and bool(self.texts.equals(other.texts))

    def indices(self, texts: pa.Array) -> npt.NDArray[np.int64]:
        """Return the index of each text; -1 for an unknown text or null."""
        texts = texts.cast(pa.large_string())
        index_N = np.full(len(texts), -1)
        if not len(self):
            return index_N
        hashes_V, index_V = self._by_hash
        hashes_N = _hash(texts)
        candidate_N = np.searchsorted(hashes_V, hashes_N)
        open_N = np.array(texts.is_valid())
        while True:
            open_N &= candidate_N < len(self)
            rows = np.flatnonzero(open_N)
            if not len(rows):
                return index_N
            same = hashes_V[candidate_N[rows]] == hashes_N[rows]
            open_N[rows[~same]] = False
            rows = rows[same]
            candidates = index_V[candidate_N[rows]]
            equal = np.asarray(pc.equal(texts.take(pa.array(rows)), self.texts.take(pa.array(candidates))))
            index_N[rows[equal]] = candidates[equal]
            open_N[rows[equal]] = False
            candidate_N += 1  # another text may have the same hash

    @cached_property
    def _by_hash(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]:
        """The hashes of all texts in ascending order, and the indices of their texts."""
        hashes = _hash(self.texts)
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order.astype(np.int32)


def text_bounds(texts: pa.LargeStringArray) -> npt.NDArray[np.int64]:
    """Return the N + 1 offsets of N texts: where each text starts, and where the last text ends."""
    if not len(texts):
        return np.zeros(1, np.int64)
    return np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]


def _hash(texts: pa.LargeStringArray) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each text: the mixed sum of its bytes, each times a factor of its position."""
    hashes = [np.empty(0, np.uint64)]
    for start in range(0, len(texts), HASHED_AT_ONCE):
        block = texts.slice(start, HASHED_AT_ONCE)
        data = block.buffers()[2]
        bounds = text_bounds(block)
        content = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
        position = np.arange(len(content)) - np.repeat(bounds[:-1] - bounds[0], np.diff(bounds))
        terms = (content.astype(np.uint64) + np.uint64(1)) * _FACTORS[position % len(_FACTORS)]
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
        hashes.append(splitmix64(np.diff(sums[bounds - bounds[0]])))
    return np.concatenate(hashes)


def write_vocabularies(path: Path, vocabularies: Sequence[Vocabulary]) -> None:
    """Write vocabularies one after the other, and their sizes into the metadata of the file."""
    sizes = json.dumps([len(each) for each in vocabularies])
    schema = pa.schema([pa.field(_COLUMN, pa.large_string(), False)], {_SIZES: sizes.encode()})
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        column_encoding={_COLUMN: "DELTA_LENGTH_BYTE_ARRAY"},
    ) as writer:
        for each in vocabularies:
            writer.write_table(pa.table([each.texts], schema), _GROUP_ROWS)


class VocabularyFile:
    """An open file of :func:`write_vocabularies`; ``sizes`` are the numbers of values of its vocabularies."""

    def __init__(self, path: StoragePath, file: pq.ParquetFile, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self._path = path
        self._file = file
        groups = (file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
        self._starts = [0, *accumulate(groups)]

    def read_all(self) -> list[Vocabulary]:
        parts = (pa.concat_arrays([_EMPTY, *self.blocks(index)]) for index in range(len(self.sizes)))
        return [Vocabulary(texts) for texts in parts]

    def blocks(self, index: int) -> Iterator[pa.LargeStringArray]:
        """Yield the values of a vocabulary, in order; DataError if it cannot be read."""
        if index >= len(self.sizes):
            raise DataError(f"{self._path}: has {len(self.sizes)} vocabularies, not {index + 1}")
        start = sum(self.sizes[:index])
        stop = start + self.sizes[index]
        group = bisect_right(self._starts, start) - 1
        while start < stop:
            with _reading(self._path):
                values = self._file.read_row_group(group).column(_COLUMN).combine_chunks()
                if values.null_count:
                    raise ValueError("a value is missing")
            yield values.slice(start - self._starts[group], stop - start)
            group += 1
            start = self._starts[group]


@contextmanager
def open_vocabularies(
    path: StoragePath, sha256: str, root: StoragePath | None = None
) -> Iterator[VocabularyFile]:
    """Open the file that ``write_vocabularies`` wrote.

    Args:
        sha256: the expected checksum of the file.
        root: see :func:`hybrid.storage.files.open_reader`.

    Raises:
        DataError: the file is missing, has another checksum, or claims more values than it can hold.
    """
    with ExitStack() as stack:
        with _reading(path):
            local = stack.enter_context(local_copy(path, sha256, root=root))
            if compute_checksum(path, root) != sha256:
                raise DataError(f"{path}: altered since it was written")
            file = stack.enter_context(pq.ParquetFile(local))
            metadata = file.metadata
            check_claimed_sizes(local, file, [0])
            columns = [metadata.row_group(group).column(0) for group in range(metadata.num_row_groups)]
            if any(not _ENCODINGS.issuperset(column.encodings) for column in columns):
                raise ValueError("its values are not encoded as this program writes them")
            if metadata.num_rows > max(_GROUP_ROWS, local.stat().st_size * MAX_VALUES_PER_BYTE):
                raise ValueError(f"it claims {metadata.num_rows:,} values")
            sizes: list[int] = parse_json((file.schema_arrow.metadata or {})[_SIZES])
            if sum(sizes) != metadata.num_rows or any(size < 0 for size in sizes):
                raise ValueError("the number of its values differs from its metadata")
            opened = VocabularyFile(path, file, sizes)
        yield opened


@contextmanager
def _reading(path: StoragePath) -> Iterator[None]:
    """Convert the exceptions for an invalid file to a DataError."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RecursionError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error

"""The Parquet file of the vocabularies of a model, which are the known values of its categorical columns."""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hybrid.checkpoint.checkpoint_folders import VOCABULARIES_FILE, vocabulary_path
from hybrid.data.parse.parquet_blocks import MAX_VALUES_PER_BYTE, check_claimed_sizes
from hybrid.data.values.vocabulary import Vocabulary
from hybrid.errors import DataError
from hybrid.storage.file_formats import parse_json
from hybrid.storage.files import compute_checksum, exists, local_copy
from hybrid.storage.remote_path import StoragePath

_COLUMN, _SIZES = "value", b"sizes"
_GROUP_ROWS = 1 << 20
# Pages with other encodings can repeat values, so a small file could expand to gigabytes.
_ENCODINGS = {"DELTA_LENGTH_BYTE_ARRAY", "PLAIN", "RLE", "BIT_PACKED"}
_EMPTY = pa.array([], pa.large_string())


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
        """Yield the values of vocabulary ``index`` in order, in blocks; DataError if it cannot be read."""
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


def find_vocabularies(folder: StoragePath, sha256: Any) -> StoragePath:
    """Return the vocabulary file of an encoder: in its folder, or in the folder ``vocabularies`` of the run.

    Raise DataError if it is missing, StorageError if the search fails, TypeError if ``sha256`` is invalid.
    """
    if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
        raise TypeError("vocabularies must be a checksum")
    name = f"{sha256}.parquet"
    beside, of_run = folder / VOCABULARIES_FILE, vocabulary_path(folder.absolute(), name)
    for path in (beside, of_run):
        if exists(path):
            return path
    rule = f"copy {name} there from the folder vocabularies of the run"
    raise DataError(f"{beside}: the vocabularies are neither here nor in {of_run.parent}; {rule}")


@contextmanager
def open_vocabularies(folder: StoragePath, sha256: Any) -> Iterator[VocabularyFile]:
    """Open and check the vocabulary file, with the checksum ``sha256``, of the encoder in ``folder``.

    Raise the errors of :func:`find_vocabularies`, and DataError if the file is unreadable or altered.
    """
    path = find_vocabularies(folder, sha256)
    root = None if path.name == VOCABULARIES_FILE else path.parent.parent
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
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RecursionError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error

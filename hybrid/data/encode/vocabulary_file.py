"""Vocabularies in a Parquet file: the values of all vocabularies in one column, one after the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from hybrid.data.encode.vocabulary import Vocabulary
from hybrid.data.parse.parquet_blocks import MAX_VALUES_PER_BYTE, check_claims
from hybrid.errors import DataError
from hybrid.storage.files import compute_checksum, local_copy
from hybrid.storage.remote_path import StoragePath

VOCABULARIES_FILE = "vocabularies.parquet"
_COLUMN, _SIZES = "value", b"sizes"
_GROUP_ROWS = 1 << 20
# Pages of other encodings can repeat values, so a small file could hold gigabytes.
_ENCODINGS = {"DELTA_LENGTH_BYTE_ARRAY", "PLAIN", "RLE", "BIT_PACKED"}


def write_vocabularies(path: Path, vocabularies: Sequence[Vocabulary]) -> None:
    """Write vocabularies in their order; the metadata of the file hold the size of each."""
    sizes = json.dumps([len(each) for each in vocabularies])
    schema = pa.schema([pa.field(_COLUMN, pa.large_string(), False)], {_SIZES: sizes.encode()})
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        column_encoding={_COLUMN: "DELTA_LENGTH_BYTE_ARRAY"},
        store_schema=True,
    ) as writer:
        for each in vocabularies:
            writer.write_table(pa.table([each.texts], schema), _GROUP_ROWS)


def read_vocabularies(place: StoragePath, sha256: str) -> list[Vocabulary]:
    """Return what ``write_vocabularies`` wrote.

    Raises:
        DataError: the file is missing, altered (it has another checksum), or claims more than it can hold.
    """
    try:
        with local_copy(place, sha256) as path:
            return _read(path, str(place), sha256)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, pa.ArrowException) as error:
        raise DataError(f"{place}: cannot be read ({error})") from error


def _read(path: Path, name: str, sha256: str) -> list[Vocabulary]:
    if compute_checksum(path) != sha256:
        raise DataError(f"{name}: altered since it was written")
    with pq.ParquetFile(path) as file:
        metadata = file.metadata
        check_claims(path, file, [0])
        columns = [metadata.row_group(group).column(0) for group in range(metadata.num_row_groups)]
        if any(not _ENCODINGS.issuperset(column.encodings) for column in columns):
            raise ValueError("its values are not encoded as this program writes them")
        if metadata.num_rows > max(_GROUP_ROWS, path.stat().st_size * MAX_VALUES_PER_BYTE):
            raise ValueError(f"it claims {metadata.num_rows:,} values")
        sizes: list[int] = json.loads((file.schema_arrow.metadata or {})[_SIZES])
        values = file.read().column(_COLUMN).combine_chunks()
    if values.null_count or sum(sizes) != len(values) or any(size < 0 for size in sizes):
        raise ValueError("its values are not as many as its metadata say")
    vocabularies, start = [], 0
    for size in sizes:
        vocabularies.append(Vocabulary(values.slice(start, size)))
        start += size
    return vocabularies

"""Vocabularies in a Parquet file: its column ``value`` holds the values of one after those of the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hybrid.data.encode.vocabulary import Vocabulary
from hybrid.data.parse import checksums
from hybrid.data.parse.parquet_blocks import check_claims
from hybrid.errors import DataError
from hybrid.storage.files import local_copy
from hybrid.storage.remote_path import StoragePath

VOCABULARIES_FILE = "vocabularies.parquet"
_COLUMN, _SIZES = "value", b"sizes"
_GROUP_ROWS = 1 << 20


def write_vocabularies(path: Path, vocabularies: Sequence[Vocabulary]) -> None:
    """Write them, in their order; how many values each has is among the metadata of the file."""
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
    """What ``write_vocabularies`` wrote.

    Raises:
        DataError: it is not there, or altered: it has not this checksum.
    """
    try:
        with local_copy(place, sha256) as path:
            return _read(path, str(place), sha256)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, pa.ArrowException) as error:
        raise DataError(f"{place}: cannot be read ({error})") from error


def _read(path: Path, name: str, sha256: str) -> list[Vocabulary]:
    if checksums.whole(path) != sha256:
        raise DataError(f"{name}: altered since it was written")
    with pq.ParquetFile(path) as file:
        check_claims(path, file, {0: file.schema.column(0)})
        sizes = json.loads((file.schema_arrow.metadata or {})[_SIZES])
        values = file.read().column(_COLUMN).combine_chunks()
    return _parted(values, sizes)


def _parted(values: Any, sizes: Sequence[int]) -> list[Vocabulary]:
    if values.null_count or sum(sizes) != len(values) or any(size < 0 for size in sizes):
        raise ValueError("its values are not as many as it says")
    found, start = [], 0
    for size in sizes:
        found.append(Vocabulary(values.slice(start, size)))
        start += size
    return found

"""Parquet files in blocks of bounded size.

Parquet can store a value once, with its number of repetitions, so a kilobyte may expand to gigabytes.
So texts in dictionaries stay encoded, and blocks are cut so that these texts fit into 64 MiB per column.
A file is rejected if its metadata claim more values or bytes than its compressed size plausibly holds.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hybrid.data.parse.column_layout import Layout, TableBlock
from hybrid.data.parse.input_files import convert_read_errors
from hybrid.data.values.column_values import convert_maps, is_list, list_lengths, take_or_default
from hybrid.errors import DataError
from hybrid.storage import files
from hybrid.storage.remote_path import RemotePath, StoragePath

BLOCK_ROWS = 65_536
MAX_DECODED_BYTES = 64 << 20  # limit for the texts in one column of a block
MAX_FIXED_BYTES = 4096  # limit for a value of fixed length
# Limits for a column of a row group: a fixed limit, and a limit per compressed byte. The larger one applies.
MAX_VALUES, MAX_VALUES_PER_BYTE = 16 << 20, 64
MAX_UNPACKED_BYTES, MAX_UNPACKED_PER_BYTE = 256 << 20, 200


def read_parquet(
    path: StoragePath, layout: Layout, start: int = 0, stop: int | None = None, block_rows: int = BLOCK_ROWS
) -> Iterator[TableBlock]:
    """Yield the rows of the row groups from ``start`` to ``stop`` - 1 in blocks, by default all rows.

    Lines are numbered from 1. For errors, see :func:`hybrid.data.parse.sources.read_segment`.
    """
    with convert_read_errors(path):
        if not files.require_file(path).size:  # Spark writes such files beside others
            return
        with open_parquet(path) as source, pq.ParquetFile(source) as file:
            layout.require(file.schema_arrow.names, path)
            names = [name for name in layout.required if name in file.schema_arrow.names]
            # The columns within a list or a map have longer paths.
            paths = {i: file.schema.column(i).path for i in range(len(file.schema))}
            columns = [i for i, each in paths.items() if each in names or each.partition(".")[0] in names]
            check_claimed_sizes(path, file, columns)
            texts = [paths[i] for i in columns if _has_dictionary(file, i)]
        # In memory, a dictionary of texts is not larger than in the file.
        with open_parquet(path) as source, pq.ParquetFile(source, read_dictionary=texts) as file:
            first = 0
            options = {"columns": names, "use_threads": False}
            # A batch has rows of one row group: pyarrow does not join dictionaries within lists.
            groups = range(start, file.num_row_groups if stop is None else stop)
            batches = (file.iter_batches(block_rows, row_groups=[group], **options) for group in groups)
            for batch in chain.from_iterable(batches):
                rest = {name: convert_maps(batch.column(name)) for name in names}
                num_left = batch.num_rows
                while num_left:
                    size = _count_fitting(path, rest, num_left)
                    rows = np.arange(size)
                    table = {name: column.slice(0, size) for name, column in rest.items()}
                    yield TableBlock(table, first + rows + 1, rows, size, size, [])
                    rest = {name: column.slice(size) for name, column in rest.items()}
                    first += size
                    num_left -= size


def _has_dictionary(file: pq.ParquetFile, i: int) -> bool:
    column, metadata = file.schema.column(i), file.metadata
    if column.physical_type != "BYTE_ARRAY" or column.logical_type.type == "DECIMAL":
        return False
    groups = (metadata.row_group(group) for group in range(metadata.num_row_groups))
    return any(group.column(i).has_dictionary_page for group in groups)


@contextmanager
def open_parquet(path: StoragePath) -> Iterator[Path | IO[bytes]]:
    """Yield a source for pyarrow: a local path, or a file object that reads ranges of a file in a store."""
    if isinstance(path, RemotePath):
        with files.open_reader(path) as file:
            yield file
        return
    with files.local_copy(path, follows_links=True) as local:
        yield local


def _count_fitting(path: StoragePath, columns: Mapping[str, pa.Array], num_rows: int) -> int:
    """Return how many of the first rows fit into 64 MiB of text per column. Raise DataError if none fits."""
    fitting = num_rows
    for name, column in columns.items():
        ends_B = np.arange(1, len(column) + 1)
        flat = column
        if is_list(column):
            ends_B = np.cumsum(list_lengths(column))
            flat = pc.list_flatten(column)
        for texts in flat.flatten() if pa.types.is_struct(flat.type) else [flat]:
            if not pa.types.is_dictionary(texts.type):
                continue
            sizes_D = np.asarray(pc.fill_null(pc.binary_length(texts.dictionary), 0))
            sizes_L = take_or_default(sizes_D, texts.indices, 0)
            bytes_B = np.append(0, np.cumsum(sizes_L, dtype=np.int64))[ends_B]  # up to the end of each row
            fitting = min(fitting, int(np.searchsorted(bytes_B, MAX_DECODED_BYTES, side="right")))
        if not fitting:
            raise DataError(
                f"{path}: a row has more than {MAX_DECODED_BYTES >> 20} MiB in column {name}; "
                "check data.sparse, or leave such rows out of the file"
            )
    return fitting


def check_claimed_sizes(path: StoragePath, file: pq.ParquetFile, columns: Collection[int]) -> None:
    """Raise DataError if metadata claim an implausible size for one of the columns at indices ``columns``."""
    rule = "if the file is correct, write it again in row groups of fewer rows"
    for i in columns:
        schema = file.schema.column(i)
        name = schema.path
        if schema.physical_type == "FIXED_LEN_BYTE_ARRAY" and schema.length > MAX_FIXED_BYTES:
            raise DataError(f"{path}: values of column {name} are longer than {MAX_FIXED_BYTES:,} bytes")
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            column = file.metadata.row_group(group).column(i)
            packed, unpacked = column.total_compressed_size, column.total_uncompressed_size
            values = column.num_values
            if values > max(rows, MAX_VALUES, packed * MAX_VALUES_PER_BYTE):
                raise DataError(f"{path}: column {name} claims {values:,} values in {packed:,} bytes; {rule}")
            if unpacked > max(MAX_UNPACKED_BYTES, packed * MAX_UNPACKED_PER_BYTE):
                raise DataError(f"{path}: column {name} claims {unpacked:,} bytes out of {packed:,}; {rule}")

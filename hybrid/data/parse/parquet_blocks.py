"""Parquet files in blocks whose size is bounded, whatever a small file claims to hold.

Parquet stores a value once and how often it occurs: a kilobyte may stand for gigabytes. So texts are read as
dictionaries, few rows at a time, and decoded to at most ``MAX_DECODED_BYTES``. A row group that claims more
than real data could be packed into its bytes is refused.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.delimited_text import TableBlock
from hybrid.data.values.column_values import is_list, without_maps
from hybrid.errors import DataError, StorageError
from hybrid.storage import files
from hybrid.storage.remote_path import RemotePath, StoragePath

BLOCK_ROWS = 65_536
MAX_DECODED_BYTES = 64 << 20  # of the texts of one column of a block
MAX_FIXED_BYTES = 4096  # of a value of fixed length
# Of a column in a row group. Real data stay below one of the two.
MAX_VALUES, MAX_VALUES_PER_BYTE = 16 << 20, 64
MAX_UNPACKED_BYTES, MAX_UNPACKED_PER_BYTE = 256 << 20, 200


def read_parquet(path: StoragePath, layout: Layout, groups: range | None = None) -> Iterator[TableBlock]:
    """Yield the required columns of a Parquet file; its rows are numbered from 1.

    Args:
        groups: the row groups to read; by default all.

    Raises:
        ConfigError: the file lacks a column.
        DataError: the file cannot be read, or claims to hold more than it can.
    """
    with _read_errors(path):
        with open_parquet(path) as source, pq.ParquetFile(source) as file:
            layout.require(file.schema_arrow.names, path)
            names, metadata = list(layout.required), file.metadata
            texts, columns = [], []
            for i in range(len(file.schema)):
                column = file.schema.column(i)
                # The columns of a list or a map have longer paths.
                if column.path not in names and column.path.partition(".")[0] not in names:
                    continue
                columns.append(i)
                if column.physical_type == "BYTE_ARRAY" and column.logical_type.type != "DECIMAL":
                    groups_of_column = (
                        metadata.row_group(g).column(i) for g in range(metadata.num_row_groups)
                    )
                    if any(each.has_dictionary_page for each in groups_of_column):
                        texts.append(column.path)
            check_claims(path, file, columns)
        # Reading texts as dictionaries takes no more than the file holds.
        with open_parquet(path) as source, pq.ParquetFile(source, read_dictionary=texts) as file:
            first = 0
            # A batch has rows of one row group: pyarrow does not join dictionaries within lists.
            for group in groups or range(file.num_row_groups):
                options = {"row_groups": [group], "columns": names, "use_threads": False}
                for batch in file.iter_batches(BLOCK_ROWS, **options):
                    whole = {name: without_maps(batch.column(name)) for name in names}
                    start = 0
                    while start < batch.num_rows:
                        rest = {name: column.slice(start) for name, column in whole.items()}
                        size = _count_fitting(path, rest, batch.num_rows - start)
                        rows = np.arange(size)
                        table = {name: column.slice(0, size) for name, column in rest.items()}
                        yield TableBlock(table, first + rows + 1, rows, size, size, [])
                        start += size
                        first += size


def parquet_names(path: StoragePath) -> list[str]:
    """Return the names of the columns of a Parquet file; DataError if it cannot be read."""
    with _read_errors(path), open_parquet(path) as source:
        return list(pq.read_schema(source).names)


@contextmanager
def _read_errors(path: StoragePath) -> Iterator[None]:
    try:
        yield
    except (MemoryError, StorageError):
        raise
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: is not a readable Parquet file ({error}); check data.format") from error


@contextmanager
def open_parquet(path: StoragePath) -> Iterator[Path | IO[bytes]]:
    """Yield what pyarrow reads a file from: a local path, or a file of a store that is read in ranges."""
    if isinstance(path, RemotePath):
        with files.open_reader(path, ahead=0) as file:
            yield file
    else:
        yield path


def _count_fitting(path: StoragePath, columns: Mapping[str, pa.Array], num_rows: int) -> int:
    """Return how many rows, from the first, have texts of at most ``MAX_DECODED_BYTES``."""
    fitting = num_rows
    for name, column in columns.items():
        ends_B = np.arange(1, len(column) + 1)
        flat = column
        if is_list(column):
            ends_B = np.cumsum(np.asarray(pc.fill_null(pc.list_value_length(column), 0)))
            flat = pc.list_flatten(column)
        for texts in flat.flatten() if pa.types.is_struct(flat.type) else [flat]:
            if not pa.types.is_dictionary(texts.type):
                continue
            sizes_D = np.append(np.asarray(pc.fill_null(pc.binary_length(texts.dictionary), 0)), 0)
            index_L = np.asarray(texts.indices.fill_null(len(texts.dictionary)))
            ends_L = np.cumsum(sizes_D[index_L], dtype=np.int64)
            items = int(np.searchsorted(ends_L, MAX_DECODED_BYTES, side="right"))
            if items < len(ends_L):
                fitting = min(fitting, int(np.searchsorted(ends_B, items, side="right")))
        if not fitting:
            raise DataError(
                f"{path}: a row has more than {MAX_DECODED_BYTES >> 20} MiB in column {name}; "
                "check data.sparse, or leave such rows out of the file"
            )
    return fitting


def check_claims(path: StoragePath, file: pq.ParquetFile, columns: Collection[int]) -> None:
    """Raise DataError if a file claims to hold more in some columns, by their indices, than it can."""
    rule = "write it anew, in row groups of fewer rows, if that is no mistake"
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

"""Parquet files in blocks whose size is bounded, whatever a small file claims to hold.

Parquet says a value once and how often it comes: a kilobyte may stand for gigabytes. So texts are read as
dictionaries, few rows at a time, and unfolded no further than ``MAX_UNFOLDED_BYTES``; a row group that claims
to be more than real data could be packed into its bytes is refused.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

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
MAX_UNFOLDED_BYTES = 64 << 20  # of the texts of one column of a block
MAX_FIXED_BYTES = 4096  # of a value of fixed length
# Of a column in a row group. Real data stay below one of the two.
MAX_VALUES, MAX_VALUES_PER_BYTE = 16 << 20, 64
MAX_UNPACKED_BYTES, MAX_UNPACKED_PER_BYTE = 256 << 20, 200


def read_parquet(path: StoragePath, layout: Layout, groups: range | None = None) -> Iterator[TableBlock]:
    """The wanted columns of a Parquet file; its rows are numbered from 1.

    Args:
        groups: the row groups that are read, where not all are.

    Raises:
        ConfigError: the file lacks a column.
        DataError: the file cannot be read, or claims to hold more than it can.
    """
    try:
        with open_parquet(path) as source, pq.ParquetFile(source) as file:
            layout.require(file.schema_arrow.names, path)
            leaves = _leaves(file, set(layout.wanted))
            check_claims(path, file, leaves)
            texts = [leaf.path for i, leaf in leaves.items() if _is_coded_text(file.metadata, i, leaf)]
        # As the dictionaries that they are: reading these costs no more than the file holds.
        with open_parquet(path) as source, pq.ParquetFile(source, read_dictionary=texts) as file:
            yield from _blocks(path, file, list(layout.wanted), groups or range(file.num_row_groups))
    except (MemoryError, StorageError):
        raise
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: is not a readable Parquet file ({error}); check data.format") from error


@contextmanager
def open_parquet(path: StoragePath) -> Iterator[Path | IO[bytes]]:
    """What pyarrow reads a file by: of this machine its path, of a store the parts that are asked for."""
    if isinstance(path, RemotePath):
        with files.open_reader(path, ahead=0) as file:
            yield file
    else:
        yield path


def _blocks(path: StoragePath, file: Any, names: list[str], groups: range) -> Iterator[TableBlock]:
    first = 0
    # A batch of one row group: pyarrow does not join dictionaries within lists.
    for group in groups:
        for batch in file.iter_batches(BLOCK_ROWS, row_groups=[group], columns=names, use_threads=False):
            whole = {name: without_maps(batch.column(name)) for name in names}
            start = 0
            while start < batch.num_rows:
                rest = {name: column.slice(start) for name, column in whole.items()}
                size = _fitting_rows(path, rest, batch.num_rows - start)
                rows = np.arange(size)
                table = {name: column.slice(0, size) for name, column in rest.items()}
                yield TableBlock(table, first + rows + 1, rows, size, size, [])
                start += size
                first += size


def _fitting_rows(path: StoragePath, columns: Mapping[str, Any], num_rows: int) -> int:
    """How many rows of ``columns``, from the first, have texts of no more than ``MAX_UNFOLDED_BYTES``."""
    fitting = num_rows
    for name, column in columns.items():
        ends_B = np.arange(1, len(column) + 1)
        if is_list(column):
            ends_B = np.cumsum(np.asarray(pc.fill_null(pc.list_value_length(column), 0)))
        for texts in _coded_texts(column):
            sizes_D = np.append(np.asarray(pc.fill_null(pc.binary_length(texts.dictionary), 0)), 0)
            at_L = np.asarray(texts.indices.fill_null(len(texts.dictionary)))
            ends_L = np.cumsum(sizes_D[at_L], dtype=np.int64)
            items = int(np.searchsorted(ends_L, MAX_UNFOLDED_BYTES, side="right"))
            if items < len(ends_L):
                fitting = min(fitting, int(np.searchsorted(ends_B, items, side="right")))
        if not fitting:
            raise DataError(
                f"{path}: a row has more than {MAX_UNFOLDED_BYTES >> 20} MiB in column {name}; "
                "check data.sparse, or leave such rows out of the file"
            )
    return fitting


def _coded_texts(column: Any) -> list[Any]:
    """The texts of a column, of all rows one after the other, where they are dictionaries."""
    flat = pc.list_flatten(column) if is_list(column) else column
    leaves = flat.flatten() if pa.types.is_struct(flat.type) else [flat]
    return [leaf for leaf in leaves if pa.types.is_dictionary(leaf.type)]


def _leaves(file: Any, wanted: set[str]) -> dict[int, Any]:
    """The columns of the file that wanted ones are made of (a list has its items in one), by their place."""
    columns = (file.schema.column(i) for i in range(len(file.schema)))
    return {
        i: column
        for i, column in enumerate(columns)
        if column.path in wanted or column.path.partition(".")[0] in wanted
    }


def _is_coded_text(metadata: Any, i: int, leaf: Any) -> bool:
    if leaf.physical_type != "BYTE_ARRAY" or leaf.logical_type.type == "DECIMAL":
        return False
    return any(metadata.row_group(g).column(i).has_dictionary_page for g in range(metadata.num_row_groups))


def check_claims(path: StoragePath, file: Any, leaves: dict[int, Any]) -> None:
    """DataError where a file claims to hold more in some columns, by their place, than it can."""
    rule = "write it anew, in row groups of fewer rows, if that is no mistake"
    for i, leaf in leaves.items():
        name = leaf.path
        if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY" and leaf.length > MAX_FIXED_BYTES:
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

"""The initial rows of tables: random, or from files (``stored_matrix``, ``saved_tables``).

A worker reads all blocks of the files, and keeps the rows of its shard. Rows are found by position, or by
value: the vocabulary of the prepared data maps values to rows of the table. A row whose value is not in the
files stays random or zero. If a value occurs several times, its last row is used.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybrid.embedding.stored_matrix import SavedRows, matrix_blocks
from hybrid.embedding.table_spec import TableSpec
from hybrid.errors import CheckpointError
from hybrid.primitives.bfloat16_arrays import assign_rows
from hybrid.primitives.key_hashes import splitmix64
from hybrid.storage.remote_path import parse_path

if TYPE_CHECKING:
    from hybrid.data.encode.feature_encoder import SparseEncoding
    from hybrid.embedding.kernels import Ints
    from hybrid.embedding.saved_tables import SavedTable

_BLOCK_VALUES = 1 << 16  # fits into the cache of a core


def fill_random_rows(out_RD: Tensor, table: TableSpec, seed: int, index: int = 0, count: int = 1) -> None:
    """Fill ``out_RD`` with random values for the rows ``index``, ``index + count``, ... of a table.

    Each value is a hash of seed, table name, row and column (SplitMix64; Steele et al. 2014). So the values
    do not depend on the placement, and each worker computes only its rows.
    """
    num_rows, dim = out_RD.shape
    block = max(1, _BLOCK_VALUES // dim)
    for start in range(0, num_rows, block):
        stop = min(start + block, num_rows)
        rows = np.arange(start, stop, dtype=np.uint64) * np.uint64(count) + np.uint64(index)
        out_RD[start:stop] = random_rows(rows, table, seed)


def random_rows(rows_U: npt.NDArray[np.uint64], table: TableSpec, seed: int) -> Tensor:
    """Return random values for ``rows_U``, (U, dim); float64 if ``table.init`` is "normal", else float32.

    Args:
        rows_U: numbers of the rows in the table; for a growing table, their keys.
    """
    dim, scale = table.dim, table.init_scale
    if table.init == "zeros":
        return torch.zeros(len(rows_U), dim)
    key = np.uint64(random_salt(seed, table.name))
    columns_D: npt.NDArray[np.uint64] = np.arange(dim, dtype=np.uint64)
    counter_UD = rows_U[:, None] * np.uint64(dim) + columns_D
    uniform_UD = (splitmix64(counter_UD + key) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    if table.init == "normal":  # inverse distribution function, with one random number per value
        normal_UD: Tensor = torch.special.ndtri(torch.from_numpy(uniform_UD).double() + 2**-25) * scale
        return normal_UD
    return torch.from_numpy((uniform_UD * 2 - 1) * np.float32(scale))


def random_salt(seed: int, table: str) -> int:
    """Return a hash of seed and table name, from 0 to 2**64 - 1, that seeds the table's random numbers."""
    return (seed * 0x9E3779B97F4A7C15 + zlib.crc32(table.encode()) * 0xD1B54A32D192ED03) % 2**64


def read_initial_rows(table: TableSpec, tensors: Mapping[str, Tensor], index: int, count: int) -> int:
    """Read the rows of a shard from the file or folder ``table.initial``. Missing rows stay unchanged.

    Args:
        tensors: receives the rows: "weight", and if ``table.has_initial_state`` also the optimizer state.
        index, count: the shard has the rows ``index``, ``index + count``, ... of the table.

    Returns:
        The number of rows read. Row 0 of the table is not counted: prepared data use it for missing values.

    Raises:
        DataError, CheckpointError, ConfigError: the source cannot be read, or does not fit the table.
        StorageError: a file cannot be fetched.
    """
    find = _row_finder(table, index, count)
    is_filled_R = np.zeros(len(tensors["weight"]), np.bool_)
    for block in initial_blocks(table):
        rows_B = find(block.keys)
        own = np.flatnonzero(rows_B >= 0)
        if not len(own):
            continue
        assign_stored(table, tensors, rows_B[own], block.read(own))  # of a repeated value, the last row
        is_filled_R[rows_B[own]] = True
    num_without_value = 1 if index == 0 else 0
    return int(is_filled_R[num_without_value:].sum())


def assign_stored(
    table: TableSpec, tensors: Mapping[str, Tensor], rows_N: Ints, stored: Mapping[str, npt.NDArray[Any]]
) -> None:
    """Copy ``stored`` to the rows ``rows_N`` of ``tensors``; raise CheckpointError if shapes do not match."""
    for name in tensors if table.has_initial_state else ["weight"]:
        if name not in stored or stored[name].shape[1:] != tensors[name].shape[1:]:
            rule = f"table {table.initial_table} has another shape or optimizer than table {table.name}"
            raise CheckpointError(f"{table.initial}: {rule}")
        assign_rows(tensors[name], rows_N, stored[name])


def initial_blocks(table: TableSpec) -> Iterator[SavedRows]:
    """Yield all rows of ``table.initial`` in blocks; for errors, see :func:`read_initial_rows`."""
    if table.is_initial_by_position:
        return matrix_blocks(table.initial, (table.num_rows, table.dim))
    from hybrid.embedding import saved_tables  # imports pyarrow, which other tables do not need

    if not table.initial_table:
        return saved_tables.parquet_blocks(table.initial, table.name, table.dim)
    return saved_table(table).blocks(_encoding(table).bounds if table.encoder_folder else None)


def saved_table(table: TableSpec) -> SavedTable:
    """Open ``table.initial_table`` of the folder ``table.initial``; errors as :func:`read_initial_rows`."""
    from hybrid.embedding import saved_tables

    return saved_tables.open_tables(parse_path(table.initial))[table.initial_table]


def keys_of(keys: Any) -> npt.NDArray[np.int64]:
    """Convert ``SavedRows.keys`` to keys of a growing table: hash texts, and keep a NumPy array as it is."""
    from hybrid.data.values.canonical import compute_keys

    if isinstance(keys, np.ndarray):
        return keys
    if hasattr(keys, "dictionary"):
        keys = keys.dictionary_decode()
    return compute_keys(keys)


def _row_finder(table: TableSpec, index: int, count: int) -> Callable[[Any], npt.NDArray[np.int64]]:
    """Return a function that converts ``SavedRows.keys`` to row numbers in shard ``index`` of ``count``.

    The function returns -1 for a key that has no row in the shard.
    """

    def of_shard(rows_B: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        is_own_B = (rows_B >= 0) & (rows_B < table.num_rows) & (rows_B % count == index)
        return np.where(is_own_B, rows_B // count, -1)

    if not table.encoder_folder:
        return of_shard
    import pyarrow as pa

    from hybrid.data.encode.feature_encoder import open_values
    from hybrid.data.values.column_values import take_or_default
    from hybrid.data.values.vocabulary import Vocabulary

    encoding = _encoding(table)
    own_values = None
    if encoding.vocabulary == "build":  # only the values of this shard, to save memory
        parts, row = [pa.array([], pa.large_string())], 1
        with open_values(parse_path(table.encoder_folder), encoding.name) as blocks:
            for texts in blocks:
                parts.append(texts.take(pa.array(np.arange((index - row) % count, len(texts), count))))
                row += len(texts)
        own_values = Vocabulary(pa.concat_arrays(parts))

    def find(keys: Any) -> npt.NDArray[np.int64]:
        if isinstance(keys, np.ndarray):
            return of_shard(keys) if own_values is None else _rows_of_keys(own_values.texts, keys, index)
        if isinstance(keys, pa.DictionaryArray):
            return take_or_default(find(keys.dictionary), keys.indices, 0 if index == 0 else -1)
        is_null_B = np.asarray(keys.is_null())
        if own_values is None:
            rows_B = encoding.rows(keys).astype(np.int64)
            return of_shard(np.where((rows_B == 0) & ~is_null_B, -1, rows_B))
        rows_B = own_values.indices(keys)
        if index == 0:  # row 0 has no value
            rows_B[rows_B >= 0] += 1
            rows_B[is_null_B] = 0
        return rows_B

    return find


def _rows_of_keys(texts: Any, keys_B: npt.NDArray[np.int64], index: int) -> npt.NDArray[np.int64]:
    """Return, for each hash, the row in shard ``index`` of the text with this hash; -1 if there is none."""
    own_R = keys_of(texts)
    if index == 0:
        own_R = np.concatenate([np.zeros(1, np.int64), own_R])  # row 0 is for missing values, whose key is 0
    if not len(own_R):
        return np.full(len(keys_B), -1)
    order_R = own_R.argsort()
    places_B = np.minimum(np.searchsorted(own_R, keys_B, sorter=order_R), len(own_R) - 1)
    rows_B = order_R[places_B]
    return np.where(own_R[rows_B] == keys_B, rows_B, -1)


def _encoding(table: TableSpec) -> SparseEncoding:
    from hybrid.data.encode.feature_encoder import FeatureEncoder

    encoder = FeatureEncoder.load(parse_path(table.encoder_folder), with_values=False)
    return next(each for each in encoder.sparse if each.name == table.features[0])

"""The initial rows of tables: random or pretrained.

Pretrained rows by position are a matrix in a safetensors file or in a NumPy file (``.npy``). A source is a
path or URL; ``path#name`` selects one of several tensors of a safetensors file. Files are read in blocks. A
worker with some rows of a table reads all rows, and keeps those. A file in an object store is fetched first.

Pretrained rows by key are a Parquet file with two columns: values, as in the data, and vectors, as lists of
numbers. The vocabulary of the prepared data maps values to rows of the table. Rows without a value in the
file keep their random values. If a value occurs several times, its last vector is used.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybrid.checkpoint.tensor_file import read_header
from hybrid.embedding.table_spec import TableSpec
from hybrid.errors import DataError, StorageError, first_line
from hybrid.primitives.splitmix64 import splitmix64
from hybrid.storage.file_formats import map_array
from hybrid.storage.files import local_copy
from hybrid.storage.remote_path import is_url, parse_path

_BLOCK_VALUES = 1 << 20
_BLOCK_BYTES = 16 << 20
_BLOCK_ROWS = 16_384


def fill_random_rows(
    out_RD: Tensor, seed: int, table: str, scale: float, index: int = 0, count: int = 1, init: str = "uniform"
) -> None:
    """Fill the rows ``index``, ``index + count``, ... of a table with random values.

    ``init`` selects the distribution: "uniform" in [-scale, scale], "normal" with standard deviation
    ``scale``, or "zeros". Each value is a hash of seed, table name, row and column (SplitMix64 as a counter;
    Steele et al. 2014). So every placement has the same table, and each worker computes only its rows.
    """
    num_rows, dim = out_RD.shape
    block = max(1, _BLOCK_VALUES // dim)
    for start in range(0, num_rows, block):
        stop = min(start + block, num_rows)
        rows = np.arange(start, stop, dtype=np.uint64) * np.uint64(count) + np.uint64(index)
        out_RD[start:stop] = random_rows(rows, dim, seed, table, scale, init)


def random_rows(
    rows_U: npt.NDArray[np.uint64], dim: int, seed: int, table: str, scale: float, init: str
) -> Tensor:
    """Return the random values of some rows, (U, dim), float32 or float64; see :func:`fill_random_rows`.

    Args:
        rows_U: numbers of the rows; for a growing table, their keys.
    """
    if init == "zeros":
        return torch.zeros(len(rows_U), dim)
    key = np.uint64(random_salt(seed, table))
    columns_D: npt.NDArray[np.uint64] = np.arange(dim, dtype=np.uint64)
    counter_UD = rows_U[:, None] * np.uint64(dim) + columns_D
    uniform_UD = (splitmix64(counter_UD + key) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    if init == "normal":  # by the inverse distribution function, which needs one random number per value
        normal_UD: Tensor = torch.special.ndtri(torch.from_numpy(uniform_UD).double() + 2**-25) * scale
        return normal_UD
    return torch.from_numpy((uniform_UD * 2 - 1) * np.float32(scale))


def random_salt(seed: int, table: str) -> int:
    """Return the number that :func:`random_rows` adds to the counter of each value."""
    return (seed * 0x9E3779B97F4A7C15 + zlib.crc32(table.encode()) * 0xD1B54A32D192ED03) % 2**64


class StoredTensor(NamedTuple):
    """A tensor in a file, read by rows.

    Attributes:
        rows: function that returns the rows from a first index to an end index.
        checksum: of the meaning of the rows (``FeatureEncoder.row_checksums``); empty if unknown.
    """

    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]
    checksum: str = ""


def make_absolute(source: str | Path) -> str:
    """Return a source as an absolute path; a URL is unchanged."""
    return str(source) if is_url(str(source)) else os.path.abspath(source)


def read_shape(source: str) -> tuple[tuple[int, ...], str]:
    """Return the numbers of rows and columns of a source, and the ``checksum`` of :class:`StoredTensor`.

    Raises:
        DataError: the source is not a matrix of floating-point values.
        StorageError: the file cannot be fetched.
    """
    with _opened(source) as matrix:
        return matrix.shape, matrix.checksum


def read_rows(source: str, out_RD: Tensor, index: int, count: int) -> None:
    """Fill ``out_RD`` with the rows ``index``, ``index + count``, ... of a source.

    Raises:
        DataError: see :func:`read_shape`; or the matrix does not have the size of the table.
    """
    with _opened(source) as matrix:
        num_rows, dim = matrix.shape
        if (len(range(index, num_rows, count)), dim) != tuple(out_RD.shape):
            raise DataError(
                f"{source}: has {num_rows} x {dim} values now, which is not the size of the table"
            )
        # A multiple of the number of shards, so that each block starts with a row of shard 0.
        step = max(1, _BLOCK_BYTES // (8 * dim)) * count
        for start in range(0, num_rows, step):
            own_RD = matrix.rows(start, min(start + step, num_rows))[index::count]
            out_RD[start // count : start // count + len(own_RD)] = own_RD


@contextmanager
def _opened(source: str) -> Iterator[StoredTensor]:
    """Open the matrix of a source."""
    path, _, name = source.partition("#")
    try:
        if path.endswith(".parquet"):
            raise LookupError("Parquet files have rows by key, which only tables of prepared data have")
        with ExitStack() as stack:
            if path.endswith(".npy"):
                array = map_array(parse_path(path), follows_links=True)
                matrix = StoredTensor(array.shape, lambda i, j: torch.from_numpy(np.array(array[i:j])))
            else:
                local_path = stack.enter_context(local_copy(parse_path(path), follows_links=True))
                read_header(local_path)  # checks its length
                file = stack.enter_context(safe_open(local_path, framework="pt"))
                names = list(file.keys())
                known = ", ".join(f"#{each}" if each.isprintable() else repr(each) for each in sorted(names))
                name = names[0] if not name and len(names) == 1 else name
                if name not in names:
                    raise LookupError(f"it has no tensor {name!r}; add one of {known}")
                tensor = file.get_slice(name)
                checksum = (file.metadata() or {}).get(name, "")
                matrix = StoredTensor(tuple(tensor.get_shape()), lambda i, j: tensor[i:j], checksum)
            if len(matrix.shape) != 2 or 0 in matrix.shape:
                raise DataError(f"{source}: has shape {list(matrix.shape)}, but must have rows and columns")
            if not matrix.rows(0, 1).is_floating_point():
                raise DataError(f"{source}: holds {matrix.rows(0, 1).dtype}, not floating-point values")
            yield matrix
    except StorageError:
        raise
    except (OSError, SafetensorError, ValueError, LookupError, RuntimeError) as error:
        # RuntimeError: torch cannot map the file, which may be larger than it looks.
        raise DataError(f"{source}: cannot be read as rows of a table: {first_line(error):.300}") from error


def read_rows_by_key(table: TableSpec, out_RD: Tensor, index: int, count: int) -> None:
    """Fill the rows ``index``, ``index + count``, ... of a table for which ``table.initial`` has a vector.

    Raises:
        DataError: the file has the wrong form, a vector has the wrong width or is not finite, or no value of
            the file has a row.
        StorageError: the file cannot be fetched.
    """
    # Late imports: tables without pretrained rows by key do not need these packages.
    import pyarrow as pa
    import pyarrow.parquet as pq

    from hybrid.data.encode.feature_encoder import FeatureEncoder
    from hybrid.data.parse.parquet_blocks import open_parquet
    from hybrid.data.values.column_values import parse_values

    (feature,) = table.features
    encoder = FeatureEncoder.load(parse_path(table.keys))
    encoding = next(each for each in encoder.sparse if each.name == feature)
    if encoding.vocabulary == "buckets":
        raise DataError(f"{table.initial}: column {feature} has buckets of numbers, which have no keys")
    num_values = 0
    num_known = 0
    try:
        with open_parquet(parse_path(table.initial)) as source, pq.ParquetFile(source) as file:
            width = len(file.schema_arrow.names)
            if width != 2:
                raise DataError(
                    f"{table.initial}: has {width} columns, but must have one of values and one of vectors"
                )
            for batch in file.iter_batches(_BLOCK_ROWS, use_threads=False):
                coded = parse_values(batch.column(0), ()).coded
                rows_D = np.append(encoding.rows(coded.dictionary), 0).astype(np.int64)
                rows_B = rows_D.take(np.asarray(coded.indices.fill_null(len(rows_D) - 1)))
                vectors_BD = _vectors(table, num_values + 1, batch.column(1))
                num_values += len(rows_B)
                num_known += int((rows_B > 0).sum())
                own_B = (rows_B > 0) & (rows_B % count == index)  # row 0 is for unknown values
                # numpy assigns the last vector of a repeated row; torch does not specify which.
                out_RD.numpy()[rows_B[own_B] // count] = vectors_BD[own_B]
    except StorageError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{table.initial}: cannot be read as rows of a table: {first_line(error)}") from error
    if not num_known:
        raise DataError(
            f"{table.initial}: none of its {num_values:,} values is in the training data of column {feature}"
        )


def _vectors(table: TableSpec, first: int, vectors: Any) -> npt.NDArray[np.float64]:
    """Return the vectors as (B, D); DataError, which counts rows from ``first``, if their form is wrong."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from hybrid.data.values.column_values import is_list

    kind = vectors.type.value_type if is_list(vectors) else vectors.type
    if not is_list(vectors) or not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        raise DataError(f"{table.initial}: its second column holds {vectors.type}, not lists of numbers")
    lengths_B = np.asarray(pc.fill_null(pc.list_value_length(vectors), 0))
    wrong_B = lengths_B != table.dim
    if wrong_B.any():
        row = int(wrong_B.argmax())
        raise DataError(
            f"{table.initial}: the vector of row {first + row} has {lengths_B[row]} numbers, but "
            f"table {table.name} has {table.dim} columns"
        )
    vectors_BD = vectors.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False).reshape(-1, table.dim)
    not_finite_B = ~np.isfinite(vectors_BD).all(axis=1)
    if not_finite_B.any():
        row = int(not_finite_B.argmax())
        raise DataError(f"{table.initial}: the vector of row {first + row} is not finite")
    return np.asarray(vectors_BD)

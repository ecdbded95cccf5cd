"""Pretrained rows by key: a Parquet file with a vector for each value of a column of the data.

The file has two columns: values, as in the data, and vectors, lists of numbers. The vocabulary of the
prepared data maps values to rows of the table. Rows without a value in the file keep their initial values;
the last of several vectors of a value counts.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch import Tensor

from hybrid.data.parse.parquet_blocks import open_parquet
from hybrid.data.prepare.dataset_location import read_encoder
from hybrid.data.values.column_values import is_list, values
from hybrid.embedding.table_spec import TableSpec
from hybrid.errors import DataError, StorageError, first_line
from hybrid.storage.remote_path import parse_path

_BLOCK_ROWS = 16_384


def read_rows_by_value(table: TableSpec, out_RD: Tensor, index: int, count: int) -> None:
    """Fill those of the rows ``index``, ``index + count``, ... of a table that ``table.initial`` has.

    Raises:
        DataError: the file is of another form, its vectors have another width or are not finite, or none of
            its values has a row.
        StorageError: the file cannot be fetched.
    """
    (feature,) = table.features
    encoder = read_encoder(table.keys)
    encoding = next(each for each in encoder.sparse if each.name == feature)
    if encoding.vocabulary == "buckets":
        raise DataError(f"{table.initial}: column {feature} has buckets of numbers, which have no keys")
    num_values, num_known = 0, 0
    try:
        with open_parquet(parse_path(table.initial)) as source, pq.ParquetFile(source) as file:
            if (width := len(file.schema_arrow.names)) != 2:
                raise DataError(
                    f"{table.initial}: has {width} columns, but must have one of values and one of vectors"
                )
            for batch in file.iter_batches(_BLOCK_ROWS, use_threads=False):
                coded = values(batch.column(0), ()).coded
                rows_D = np.append(encoding.rows(coded.dictionary), 0).astype(np.int64)
                rows_B = rows_D.take(np.asarray(coded.indices.fill_null(len(rows_D) - 1)))
                vectors_BD = _vectors(table, num_values + 1, batch.column(1))
                num_values += len(rows_B)
                num_known += int((rows_B > 0).sum())
                own_B = (rows_B > 0) & (rows_B % count == index)  # row 0 is for values without a row
                # For repeated rows numpy keeps the last vector; torch does not promise it.
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
    """Return the vectors as (B, D); DataError if they have another form."""
    kind = vectors.type.value_type if is_list(vectors) else vectors.type
    if not is_list(vectors) or not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        raise DataError(f"{table.initial}: its second column holds {vectors.type}, not lists of numbers")
    lengths_B = np.asarray(pc.fill_null(pc.list_value_length(vectors), 0))
    if (wrong_B := lengths_B != table.dim).any():
        row = int(wrong_B.argmax())
        raise DataError(
            f"{table.initial}: the vector of row {first + row} has {lengths_B[row]} numbers, but "
            f"table {table.name} has {table.dim} columns"
        )
    vectors_BD = vectors.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False).reshape(-1, table.dim)
    if (not_finite_B := ~np.isfinite(vectors_BD).all(axis=1)).any():
        row = int(not_finite_B.argmax())
        raise DataError(f"{table.initial}: the vector of row {first + row} is not finite")
    return np.asarray(vectors_BD)

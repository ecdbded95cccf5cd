"""Readers of stored rows, with their values, keys or numbers: checkpoints, exports and Parquet files.

In a checkpoint or an export, the files of a growing table have the key of each row. For columns with
vocabulary "build", the encoder has the value of each row. Other rows have numbers only. A Parquet file has a
column of values and a column of vectors (lists of numbers). Files are read in blocks, so a table may be
larger than the memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hybrid.checkpoint.checkpoint_folders import CUSTOM_LOOP
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.stored_keys import Arrays, read_keys
from hybrid.config import TableSection
from hybrid.config.loading import CONFIG_FILE, load_config
from hybrid.config.table_sections import table_optimizer
from hybrid.config.validation import table_of_column
from hybrid.data.encode.feature_encoder import FILE_NAME, FeatureEncoder, SparseEncoding, open_values
from hybrid.data.parse.parquet_blocks import open_parquet
from hybrid.data.values.column_values import is_list, parse_values
from hybrid.embedding.stored_matrix import ReadRows, SavedRows, rows_of
from hybrid.errors import DataError, StorageError, first_line
from hybrid.primitives.bfloat16_arrays import to_floats
from hybrid.primitives.key_hashes import NUM_BUCKETS
from hybrid.storage.files import exists
from hybrid.storage.remote_path import StoragePath, parse_path

_BLOCK_ROWS = 16_384


@dataclass(frozen=True)
class SavedTable:
    """A table of a checkpoint or of an export."""

    name: str
    folder: StoragePath  # folder of its files and its encoder
    checkpoint: Checkpoint
    # num_rows, dim: the shape of the table.
    num_rows: int
    dim: int
    optimizer: str  # name of its optimizer; empty in an export, which has no optimizer state
    # The encodings of the table's columns, without vocabularies; empty if the values of rows are unknown.
    # Columns with vocabulary "build" that share a table share the vocabulary.
    encodings: tuple[SparseEncoding, ...]

    def blocks(self, bounds: tuple[float, ...] | None = None) -> Iterator[SavedRows]:
        """Yield all rows in blocks, with any stored optimizer state. ``encodings`` must not be empty.

        Args:
            bounds: for a column that divides numbers into ranges, the bounds in the new model. Each new
                range gets the row of the stored range that contains the middle of the new range.

        Raises:
            CheckpointError, DataError, StorageError: a file cannot be read, or has other rows than expected.
        """
        encoding = self.encodings[0]
        if encoding.num_rows > self.num_rows:
            raise DataError(
                f"{self.folder}: table {self.name} has fewer rows than its column {encoding.name}"
            )
        if encoding.is_growing:
            widths = {"weight": (self.dim,)}
            for keys in read_keys(self.checkpoint, self.name, range(NUM_BUCKETS), widths):
                yield SavedRows(keys.records_R2[:, 0], partial(_take, keys.rows))
            return
        read = partial(self.checkpoint.map_rows(self.name, self.num_rows, self.dim).read, with_state=True)
        if encoding.vocabulary == "build":
            yield SavedRows(pa.nulls(1, pa.large_string()), read)
            first = 1
            with open_values(self.folder, encoding.name) as parts:
                for texts in parts:
                    if first + len(texts) > self.num_rows:
                        raise DataError(f"{self.folder}: table {self.name} has more values than rows")
                    for start in range(0, len(texts), _BLOCK_ROWS):
                        keys = texts.slice(start, _BLOCK_ROWS)
                        yield SavedRows(keys, _offset_reader(read, first))
                        first += len(keys)
        elif bounds is not None and bounds != encoding.bounds:
            rows = _match_ranges(np.array(encoding.bounds), np.array(bounds))
            yield SavedRows(np.arange(len(rows)), lambda index: read(rows[index]))
        else:
            for start in range(0, self.num_rows, _BLOCK_ROWS):
                numbers = np.arange(start, min(start + _BLOCK_ROWS, self.num_rows))
                yield SavedRows(numbers, _offset_reader(read, start))


def _take(rows: Arrays, index: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
    return {name: to_floats(array[index]) for name, array in rows.items()}


def _offset_reader(read: ReadRows, first: int) -> ReadRows:
    return lambda index: read(index + first)


def _match_ranges(stored: npt.NDArray[Any], new: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the stored row for each new row, given the bounds of the stored and of the new ranges."""
    middles = np.concatenate([[-np.inf], (new[:-1] + new[1:]) / 2, [np.inf]])[: 1 + len(new)]
    return np.concatenate([[0], 1 + np.searchsorted(stored, middles, side="right")])


def open_tables(folder: StoragePath) -> dict[str, SavedTable]:
    """Return the tables of a checkpoint or an export, by name, without reading rows or values.

    Raises:
        CheckpointError, DataError, ConfigError, StorageError: a file is missing, or cannot be read.
    """
    checkpoint = Checkpoint.open(folder)
    files_folder, manifest = checkpoint.files_folder, checkpoint.manifest
    config = load_config(files_folder / CONFIG_FILE, is_stored=True)
    encodings: dict[str, list[SparseEncoding]] = {}
    # The columns of the tables of a custom loop are not stored.
    if CUSTOM_LOOP not in manifest.progress and exists(files_folder / FILE_NAME):
        table_of = table_of_column(config.tables)
        for each in FeatureEncoder.load(files_folder, with_values=False).sparse:
            encodings.setdefault(table_of.get(each.name, each.name), []).append(each)
    tables = {}
    for name, (num_rows, dim, _) in manifest.tables.items():
        section = config.tables.get(name, TableSection())
        optimizer = "frozen" if section.frozen else table_optimizer(config.embedding, section).name
        optimizer = "" if checkpoint.is_exported else optimizer
        columns = tuple(encodings.get(name, ()))
        tables[name] = SavedTable(name, files_folder, checkpoint, num_rows, dim, optimizer, columns)
    return tables


def parquet_blocks(source: str, table: str, dim: int) -> Iterator[SavedRows]:
    """Yield the rows of a Parquet file in blocks, for a table of width ``dim``. Values can repeat.

    Raises:
        DataError: the columns are not values and vectors, or a vector has a wrong width or is not finite.
        StorageError: the file cannot be fetched.
    """
    num_rows = 0
    try:
        with open_parquet(parse_path(source)) as opened, pq.ParquetFile(opened) as file:
            width = len(file.schema_arrow.names)
            if width != 2:
                raise DataError(
                    f"{source}: has {width} columns, but must have one of values and one of vectors"
                )
            for batch in file.iter_batches(_BLOCK_ROWS, use_threads=False):
                coded = parse_values(batch.column(0), ()).coded
                vectors_BD = _vectors(source, table, dim, num_rows + 1, batch.column(1))
                num_rows += len(vectors_BD)
                yield SavedRows(coded, rows_of(vectors_BD))
    except StorageError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{source}: cannot be read as rows of a table: {first_line(error)}") from error


def _vectors(source: str, table: str, dim: int, first: int, vectors: Any) -> npt.NDArray[np.float64]:
    """Return a column of vectors as (B, dim), or raise DataError. The column starts at row ``first``."""
    kind = vectors.type.value_type if is_list(vectors) else vectors.type
    if not is_list(vectors) or not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        raise DataError(f"{source}: its second column holds {vectors.type}, not lists of numbers")
    lengths_B = np.asarray(pc.fill_null(pc.list_value_length(vectors), 0))
    wrong_B = lengths_B != dim
    if wrong_B.any():
        row = int(wrong_B.argmax())
        raise DataError(
            f"{source}: the vector of row {first + row} has {lengths_B[row]} numbers, but "
            f"table {table} has {dim} columns"
        )
    vectors_BD = vectors.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False).reshape(-1, dim)
    not_finite_B = ~np.isfinite(vectors_BD).all(axis=1)
    if not_finite_B.any():
        row = int(not_finite_B.argmax())
        raise DataError(f"{source}: the vector of row {first + row} is not finite")
    return np.asarray(vectors_BD)

"""Stored rows with values, in blocks: tables of checkpoints, exported folders and Parquet files.

The values for a checkpoint or an exported folder come from its encoder. Files are mapped into memory, and
values are read in blocks, so a table may be larger than the memory. A Parquet file has a column of values as
in the data, and a column of vectors (lists of numbers).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hybrid.checkpoint.checkpoint_folders import CUSTOM_LOOP, KEYS_SUFFIX, TABLES_FILE
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.stored_keys import Arrays, read_keys
from hybrid.checkpoint.tensor_file import map_arrays, read_header
from hybrid.config import TableSection
from hybrid.config.loading import CONFIG_FILE, load_config
from hybrid.config.table_sections import table_optimizer
from hybrid.config.validation import table_of_column
from hybrid.data.encode.feature_encoder import FILE_NAME, FeatureEncoder, SparseEncoding, open_values
from hybrid.data.parse.parquet_blocks import open_parquet
from hybrid.data.values.column_values import is_list, parse_values
from hybrid.embedding.stored_matrix import ReadRows, SavedRows, open_matrix, rows_of
from hybrid.errors import DataError, StorageError, first_line
from hybrid.primitives.key_buckets import NUM_BUCKETS
from hybrid.storage.file_formats import parse_json
from hybrid.storage.files import exists, local_copy
from hybrid.storage.remote_path import StoragePath, parse_path

_BLOCK_ROWS = 16_384


@dataclass(frozen=True)
class SavedTable:
    """A table of a checkpoint or of an exported folder."""

    name: str
    folder: StoragePath  # folder of its files and its encoder
    checkpoint: Checkpoint | None  # None for an exported folder
    # num_rows, dim: the shape of the table.
    num_rows: int
    dim: int
    optimizer: str  # name of the optimizer whose state is stored; empty if none is
    # The encodings of the table's columns, without vocabularies; empty if the values of rows are unknown.
    # Columns with vocabulary "build" that share a table share the vocabulary.
    encodings: tuple[SparseEncoding, ...]

    def blocks(self, bounds: tuple[float, ...] | None = None) -> Iterator[SavedRows]:
        """Yield all rows and their optimizer state, in the order of their numbers.

        Args:
            bounds: if given, yield one row per bucket of these bounds, instead of the stored buckets. A
                bucket gets the row of the stored bucket that holds its middle.

        Raises:
            CheckpointError, DataError: a file cannot be read, or its rows differ from the expected ones.
        """
        encoding = self.encodings[0]
        if encoding.num_rows > self.num_rows:
            raise DataError(
                f"{self.folder}: table {self.name} has fewer rows than its column {encoding.name}"
            )
        if encoding.is_growing:
            yield from self._keyed_blocks()
            return
        with self._opened() as read:
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
                rows = _matching_buckets(np.array(encoding.bounds), np.array(bounds))
                yield SavedRows(np.arange(len(rows)), lambda index: read(rows[index]))
            else:
                for start in range(0, self.num_rows, _BLOCK_ROWS):
                    numbers = np.arange(start, min(start + _BLOCK_ROWS, self.num_rows))
                    yield SavedRows(numbers, _offset_reader(read, start))

    def _keyed_blocks(self) -> Iterator[SavedRows]:
        """Yield the rows of a growing table, file by file."""
        if self.checkpoint is None:
            tensors = map_arrays(self.folder / TABLES_FILE)
            keys, weight = (tensors.get(self.name + suffix) for suffix in (KEYS_SUFFIX, ""))
            if keys is None or weight is None or keys.shape != weight.shape[:1] or keys.dtype != np.int64:
                raise DataError(f"{self.folder}: table {self.name} has no key for each row")
            yield SavedRows(keys, lambda index: {"weight": weight[index]})
            return
        widths = {"weight": (self.dim,)}
        for stored in read_keys(self.checkpoint, self.name, range(NUM_BUCKETS), widths, has_any_state=True):
            yield SavedRows(stored.records_R2[:, 0], partial(_take, stored.rows))

    @contextmanager
    def _opened(self) -> Iterator[ReadRows]:
        """Yield a function that reads rows by their numbers."""
        if self.checkpoint is not None:
            yield self.checkpoint.row_reader(self.name)
            return
        with open_matrix(f"{self.folder / TABLES_FILE}#{self.name}") as matrix:
            yield lambda rows: {"weight": matrix.rows(int(rows[0]), int(rows[-1]) + 1)[rows - rows[0]]}


def _take(rows: Arrays, index: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
    return {name: array[index] for name, array in rows.items()}


def _offset_reader(read: ReadRows, first: int) -> ReadRows:
    return lambda index: read(index + first)


def _matching_buckets(stored: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Map each row of a column of buckets to a stored row, by the bounds ``stored`` and ``wanted``."""
    middles = np.concatenate([[-np.inf], (wanted[:-1] + wanted[1:]) / 2, [np.inf]])[: 1 + len(wanted)]
    return np.concatenate([[0], 1 + np.searchsorted(stored, middles, side="right")])


def open_tables(folder: StoragePath) -> dict[str, SavedTable]:
    """Return the tables of a checkpoint or exported folder, by name; read no other content.

    Raises:
        CheckpointError, DataError, ConfigError: the folder is neither, or one of its files cannot be read.
    """
    if exists(folder / TABLES_FILE):
        return _exported_tables(folder)
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
        columns = tuple(encodings.get(name, ()))
        tables[name] = SavedTable(name, files_folder, checkpoint, num_rows, dim, optimizer, columns)
    return tables


def _exported_tables(folder: StoragePath) -> dict[str, SavedTable]:
    path = folder / TABLES_FILE
    encodings = {each.name: each for each in FeatureEncoder.load(folder, with_values=False).sparse}
    tables = {}
    try:
        with local_copy(path) as local:
            header = parse_json(read_header(local))
        column_of = header.pop("__metadata__", {})  # empty for a custom loop
        for name, entry in header.items():
            if name.endswith(KEYS_SUFFIX):
                continue
            num_rows, dim = entry["shape"]
            columns = (encodings[column_of[name]],) if name in column_of else ()
            tables[name] = SavedTable(name, folder, None, num_rows, dim, "", columns)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: is not an export of tables: {first_line(error):.300}") from error
    return tables


def parquet_blocks(source: str, table: str, dim: int) -> Iterator[SavedRows]:
    """Yield the rows of a Parquet file for a table of width ``dim``; a value may occur several times.

    Raises:
        DataError: the file has the wrong form, or a vector has the wrong width or is not finite.
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
    """Return the vectors as (B, D); DataError if their form is wrong. ``first`` is the first row's number."""
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

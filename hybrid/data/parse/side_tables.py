"""Side tables, whose columns are joined to the rows of the input by a key.

Memory holds the key column of a side table, and the columns that a model reads. Two keys are equal if their
canonical texts are equal (:mod:`hybrid.data.values.canonical`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.config import DataSection
from hybrid.config.data_sections import JOINS
from hybrid.config.key import Call
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.input_files import WHILE_READ, InputFile, convert_read_errors, path_columns
from hybrid.data.parse.sources import Segment, all_columns, read_names, read_segment
from hybrid.data.values.column_values import decode_dictionaries, take_or_default
from hybrid.data.values.invalid_rows import format_value
from hybrid.data.values.model_columns import ColumnReader, TargetSpec
from hybrid.data.values.vocabulary import Vocabulary
from hybrid.errors import ConfigError, DataError
from hybrid.storage import files as storage
from hybrid.storage.remote_path import StoragePath, parse_path

_MANY_ROWS = 1000
_PARQUET = b"PAR1"  # the first bytes of a file


@dataclass(frozen=True, eq=False)
class SideTable:
    """A side table in memory."""

    path: str  # the path of the first non-empty file of the side table, for messages
    key: str  # the column whose values are looked up in ``keys``: of the input, or of an earlier side table
    keys: Vocabulary  # the key of each row of the side table
    columns: pa.Table  # the columns that the model reads

    def join(self, reader: ColumnReader) -> dict[str, pa.Array]:
        """Return the values of ``columns`` for each row of the block of ``reader``.

        Values are null for a missing or unknown key. Reject rows whose key is too long, or is inexact
        (:mod:`hybrid.data.values.canonical`). Raise ConfigError if the key column of the block holds lists.
        Raise DataError if the block has at least 1000 rows, and all their keys are missing or unknown.
        """
        if not self.columns.column_names:  # the model reads none
            return {}
        coded = reader.values(self.key, JOINS)
        rows_B = take_or_default(self.keys.indices(coded.dictionary), coded.indices, -1)
        if len(rows_B) >= _MANY_ROWS and rows_B.max() < 0:
            first = format_value(self.keys.texts[0].as_py())
            rule = f"none of {len(rows_B):,} rows has a key of {self.path} in {self.key}, such as {first}"
            raise DataError(f"{rule}; check {JOINS}")
        found = self.columns.take(pa.array(rows_B, mask=rows_B < 0))
        return {name: found[name].combine_chunks() for name in found.column_names}


def read_side_tables(
    data: DataSection, names: Collection[str], files: Sequence[Sequence[InputFile]], *, with_rows: bool = True
) -> tuple[SideTable, ...]:
    """Read the side tables of ``data.joins`` into memory.

    Args:
        names: the columns that the model reads; other columns of the files are skipped.
        files: the files of each side table; see :func:`hybrid.data.parse.input_files.find_side_files`.
        with_rows: whether to read rows. If not, the tables have no rows, and only columns are checked.

    Raises:
        ConfigError: a file lacks the key column, or a column that the first non-empty file of the same table
            has; the key column holds lists; or a column to join has the name of an earlier column or key.
        DataError: a file is unreadable, changed or has an invalid row; or a table has no rows or a key twice.
        StorageError: a store refuses a request, or the system refuses a path.
    """
    tables: list[SideTable] = []
    owners: dict[str, str] = {}
    for call, group in zip(data.join_calls, files, strict=True):
        table = _read_table(data, call, names, group, with_rows)
        tables.append(table)
        owners[table.key] = f"the key of {table.path}"
        for name in table.columns.column_names:
            if name in owners:
                rule = f"is a column of {table.path}, and {owners[name]}; rename one of the two"
                raise ConfigError(JOINS, rule, name)
            owners[name] = f"a column of {table.path}"
    return tuple(tables)


def _read_table(
    data: DataSection, call: Call, names: Collection[str], files: Sequence[InputFile], with_rows: bool
) -> SideTable:
    key = call["table_key"] or call["key"]
    data = DataSection(columns=call["columns"], delimiter=data.delimiter, missing=data.missing)
    wanted: list[str] | None = None  # as the first file has them
    parts: list[pa.Table] = []
    lines: list[tuple[StoragePath, npt.NDArray[np.int64]]] = []  # of the rows of each part
    for file in files:
        path = parse_path(file.path)
        with convert_read_errors(path), storage.open_reader(path, follows_links=True) as opened:
            start = opened.read(len(_PARQUET))
        if not start:  # Spark writes such files beside others
            continue
        of_format = replace(data, format="parquet" if start == _PARQUET else "csv")
        layout = Layout(of_format, (), (), TargetSpec({}, data, False), True, True, ((JOINS, key),))
        if wanted is None:
            found = {*read_names(path, layout), *path_columns(path)}
            wanted = [name for name in names if name in found and name != key]
            parts.append(pa.table({name: pa.nulls(0) for name in (*wanted, key)}))
            lines.append((path, np.empty(0, np.int64)))
        layout = replace(layout, passthrough=tuple((JOINS, name) for name in (key, *wanted)))
        for block in read_segment(Segment(path), layout) if with_rows else ():
            columns = all_columns(path, block)
            reader = ColumnReader(columns, block.lines, data.missing)
            with convert_read_errors(path):
                texts = reader.values(key, JOINS).dictionary_decode()
                part = {name: decode_dictionaries(columns[name]) for name in wanted}
                parts.append(pa.table({**part, key: texts}).filter(texts.is_valid()))
            lines.append((path, block.lines[np.asarray(texts.is_valid())]))
            for wrong in (*block.invalid, *reader.invalid):
                raise DataError(f"{path}:{wrong.line}: {wrong.found}; {JOINS} needs valid rows")
        if InputFile.of(path).sampled != file.sampled:
            raise DataError(f"{path}: {WHILE_READ}")
    if not any(map(len, parts)) and (with_rows or not parts):
        raise DataError(f"{', '.join(call['path'])}: no rows; check {JOINS}")
    with convert_read_errors(lines[0][0]):
        table = pa.concat_tables(parts, promote_options="permissive").combine_chunks()
    keys = Vocabulary(table[key].combine_chunks())
    for row in np.flatnonzero(keys.indices(keys.texts) != np.arange(len(keys))).tolist():
        text = format_value(keys.texts[row].as_py())
        for path, of_part in lines:
            if row < len(of_part):
                rule = "keep one row for each key"
                raise DataError(f"{path}:{of_part[row]}: an earlier row has the same {key}, {text}; {rule}")
            row -= len(of_part)
    return SideTable(str(lines[0][0]), call["key"], keys, table.drop_columns([key]))

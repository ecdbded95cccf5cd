"""The columns of an input file, and the columns that a configuration requires."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.config import ColumnSection, DataSection, RunConfig, TaskSection
from hybrid.config.data_sections import JOINS, Column, columns_of
from hybrid.config.validation import check_columns, check_fields
from hybrid.data.parse.input_files import path_columns
from hybrid.data.values.canonical import canonical_text
from hybrid.data.values.invalid_rows import InvalidRow, format_value
from hybrid.data.values.model_columns import TargetSpec
from hybrid.errors import ConfigError, DataError, most_similar
from hybrid.input_spec import InputSpec
from hybrid.storage.remote_path import StoragePath

if TYPE_CHECKING:
    from hybrid.data.parse.side_tables import SideTable

CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))
CRITEO_SPARSE = tuple(f"C{i}" for i in range(1, 27))
CRITEO_LABEL = "label"
_MAX_SHOWN = 10  # columns in a message
_NO_SECTIONS: Mapping[str, Any] = MappingProxyType({})


class TableBlock(NamedTuple):
    """Consecutive rows of one file: the columns of the n valid rows, and a list of the invalid rows."""

    columns: dict[str, pa.Array]  # the required columns by name, n values each
    lines: npt.NDArray[np.int64]  # (n,), 1-based number of the line (Parquet: of the row) in the segment
    rows: npt.NDArray[np.int64]  # (n,), 0-based index of the row in the block; invalid rows count
    num_rows: int  # number of rows, valid and invalid
    num_lines: int  # number of lines, also blank lines and the header (Parquet: number of rows)
    invalid: list[InvalidRow]


@dataclass(frozen=True)
class Layout:
    """The columns to read from an input file, and the format of the file."""

    data: DataSection  # the section [data]; for Criteo, with the columns and the delimiter of the format
    dense: tuple[Column, ...]  # the numeric features of the model
    sparse: tuple[Column, ...]  # the categorical features of the model
    targets: TargetSpec  # labels, weights and groups
    with_labels: bool  # whether the columns of ``targets`` are read; if not, a file may lack them
    quotes: bool  # whether fields may be quoted with ``"``
    passthrough: tuple[tuple[str, str], ...] = ()  # further columns, not converted: (configuration key, name)
    reads_keys: bool = False  # whether integers for growing tables are converted to keys, not to texts
    side_tables: tuple[SideTable, ...] = ()  # the tables of ``data.joins``; empty until they are read
    optional: frozenset[str] = frozenset()  # columns that a file may lack; all their values are then missing

    @classmethod
    def of(
        cls,
        data: DataSection,
        columns: Mapping[str, ColumnSection] = _NO_SECTIONS,
        tasks: Mapping[str, TaskSection] = _NO_SECTIONS,
        *,
        with_labels: bool = True,
        passthrough: Sequence[tuple[str, str]] = (),
    ) -> Layout:
        """Return the layout of the sections [data], [columns.NAME] and [tasks.NAME].

        Raise ConfigError if a key has an invalid value, or two keys conflict.
        """
        is_criteo = data.format == "criteo"
        if is_criteo:
            data = dataclasses.replace(
                data,
                columns=(CRITEO_LABEL, *CRITEO_DENSE, *CRITEO_SPARSE),
                delimiter="\t",
                label=CRITEO_LABEL,
                dense=data.dense or CRITEO_DENSE,
                sparse=data.sparse or CRITEO_SPARSE,
                multi_hot_separator="",
            )
        check_fields(data, lambda label: canonical_text(label)[0])
        if with_labels and not data.positive_labels:
            raise ConfigError("data.positive_labels", "must name at least one label value")
        if not data.dense and not data.sparse:
            raise ConfigError("data.sparse", "must name at least one column (or data.dense must)")
        name, count = Counter(data.columns).most_common(1)[0] if data.columns else ("", 0)
        if count > 1:
            raise ConfigError("data.columns", "names a column twice", name)
        if with_labels:
            check_columns(data, columns, tasks)
        targets = TargetSpec.of(tasks, data)
        columns_read = columns_of(data, columns)
        return cls(data, *columns_read, targets, with_labels, not is_criteo, tuple(passthrough))

    @property
    def required(self) -> tuple[str, ...]:
        """The names of the columns that a file, or a folder ``NAME=VALUE`` of its path, must provide."""
        joined = self.joined
        return tuple(dict.fromkeys(name for _, name in self.keys_and_columns if name not in joined))

    @property
    def joined(self) -> dict[str, str]:
        """The names of the columns of side tables, each with the path of a file of the side table."""
        return {name: table.path for table in self.side_tables for name in table.columns.column_names}

    @property
    def delimiter(self) -> str:
        """``data.delimiter`` if it is one character, else the character that replaces it before parsing."""
        return self.data.delimiter if len(self.data.delimiter) == 1 else "\x1f"

    @property
    def without_holdouts(self) -> Layout:
        """A copy that holds out no rows: ``data.split`` and ``data.validation`` are "none"."""
        data = dataclasses.replace(self.data, split="none", validation="none")
        return dataclasses.replace(self, data=data)

    def require(self, names: Sequence[str], path: StoragePath) -> None:
        """Check that a file with the columns ``names`` has each column to read.

        A side table, or a folder ``NAME=VALUE`` in ``path``, may provide a column instead of the file. Raise
        ConfigError if a column is missing and not optional, or if both the file and a side table have a
        column. Raise DataError if two columns of the file have the name of a column to read.
        """
        known, joined = [*names, *path_columns(path)], self.joined
        for key, name in self.keys_and_columns:
            if name in joined:
                if name in known:
                    rule = f"{path} and {joined[name]} both have this column; rename one of the two"
                    raise ConfigError(JOINS, rule, name)
            elif name not in known and (name not in self.optional or (key, name) in self.passthrough):
                nearest = most_similar(name, [*known, *joined])
                columns = ", ".join(map(format_value, [*known, *joined][:_MAX_SHOWN]))
                hint = f"did you mean {format_value(nearest)}?" if nearest else f"it has {columns}"
                nor = ", nor has a side table" if self.side_tables else ""
                raise ConfigError(key, f"{path} has no such column{nor}; {hint}", name)
            if names.count(name) > 1:
                positions = " and ".join(str(i) for i, each in enumerate(names, start=1) if each == name)
                rule = f"rename one, since {key} names it"
                raise DataError(f"{path}: columns {positions} have the same name, {name!r}; {rule}")

    @property
    def keys_and_columns(self) -> list[tuple[str, str]]:
        """All columns to read, as pairs of a configuration key and a column that the key names."""
        named = [(column.key("dense"), source) for column in self.dense for source in column.sources]
        named += [(column.key("sparse"), source) for column in self.sparse for source in column.sources]
        named += [(each.key, each.column) for each in self.data.holdouts if each.column]
        named += self.targets.columns() if self.with_labels else []
        named += [(JOINS, call["key"]) for call in self.data.join_calls]
        return [*named, *self.passthrough]


def create_file_section(config: RunConfig, files: Sequence[StoragePath], spec: InputSpec) -> DataSection:
    """Return the section [data] for files that a trained model reads, for example to predict.

    The section holds out no rows. If training used synthetic data, the format follows from the names of
    ``files``. Raise ConfigError if the format is CSV, and a multi-hot column has no separator.
    """
    file_format = config.data.format
    if file_format == "synthetic":  # there were no training files
        file_format = "parquet" if all(path.suffix == ".parquet" for path in files) else "csv"
    data = dataclasses.replace(
        config.data,
        format=file_format,
        dense=spec.dense_features,
        sparse=tuple(f.name for f in spec.sparse_features),
        split="none",
        validation="none",
        stream="none",
    )
    if data.format == "csv":
        for feature, column in zip(spec.sparse_features, columns_of(data, config.columns)[1], strict=True):
            if feature.multi_hot and column.kind == "value" and not column.separator:
                rule = f"must be set in the training configuration, since {feature.name} has several ids"
                raise ConfigError("data.multi_hot_separator", rule)
    return data

"""Columns of the input that stand beside its predictions, as they are in the files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hybrid.config import DataSection, RunConfig
from hybrid.data.parse.column_layout import Layout
from hybrid.data.parse.delimited_text import TableBlock, read_text
from hybrid.data.parse.parquet_blocks import read_parquet
from hybrid.data.values.column_values import decoded, is_list
from hybrid.errors import ConfigError, DataError
from hybrid.storage.remote_path import Place

OPTION = "--keep"


def check_names(names: Sequence[str], taken: Sequence[str]) -> None:
    """ConfigError where a name stands there twice, or is that of another column of the output."""
    for place, name in enumerate(names):
        if name in taken:
            raise ConfigError(OPTION, "is the name of another column of the output", name)
        if name in names[:place]:
            raise ConfigError(OPTION, "names a column twice", name)


@dataclass(frozen=True)
class KeptColumns:
    """Some columns of some files.

    Attributes:
        files: in their order.
        layout: says how they are written, and which columns are read.
    """

    files: Sequence[Place]
    layout: Layout

    @classmethod
    def of(
        cls, files: Sequence[Place], data: DataSection, config: RunConfig, names: Sequence[str]
    ) -> KeptColumns:
        """The columns ``names`` of files that are written as ``data`` says.

        Args:
            config: has the columns and the tasks of the model.
        """
        layout = Layout.of(data, config.columns, config.tasks, with_labels=False)
        return cls(files, layout.reading(names, OPTION))

    def check(self) -> None:
        """See that every file has them; what of it is read is its beginning.

        Raises:
            ConfigError: a file lacks a column.
            DataError: a file cannot be read.
        """
        for path in self.files:
            next(self._tables(path), None)

    def blocks(self, rows_N: npt.NDArray[np.int64]) -> Iterator[dict[str, Any]]:
        """The columns of some rows, as pyarrow arrays by name, one block of rows after the other.

        Args:
            rows_N: of all files in turn, in ascending order, as :class:`RawBlock` counts them.

        Raises:
            DataError: a file cannot be read, or has other rows than it had.
        """
        first_row = done = 0
        for path in self.files:
            for table in self._tables(path):
                stop = int(np.searchsorted(rows_N, first_row + table.num_rows))
                wanted_B = np.isin(first_row + table.rows, rows_N[done:stop])
                if wanted_B.sum() != stop - done:
                    raise _changed(path)
                done, first_row = stop, first_row + table.num_rows
                wanted = pa.array(wanted_B)
                yield {name: _plain(column.filter(wanted)) for name, column in self._ordered(table)}
        if done != len(rows_N):
            raise _changed(self.files[-1])

    def _ordered(self, table: TableBlock) -> Iterator[tuple[str, Any]]:
        for name in self.layout.wanted:
            yield name, table.columns[name]

    def _tables(self, path: Place) -> Iterator[TableBlock]:
        is_parquet = self.layout.data.format == "parquet"
        yield from read_parquet(path, self.layout) if is_parquet else read_text(path, self.layout)


def _changed(path: Place) -> DataError:
    return DataError(f"{path}: has changed while it was read; start again once it is complete")


def _plain(column: Any) -> Any:
    """A column without dictionaries, which differ from block to block."""
    column = decoded(column)
    if not is_list(column):
        return column
    kind = column.type.value_type
    if pa.types.is_struct(kind):  # an id and its weight
        fields = [kind.field(i) for i in range(kind.num_fields)]
        pair = pa.struct([(field.name, _plain_type(field.type)) for field in fields])
        return column.cast(pa.list_(pair))
    return column.cast(pa.list_(_plain_type(kind)))


def _plain_type(kind: Any) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind

"""Which columns a file has, and which of them are wanted."""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hybrid.config import ColumnSection, DataSection, TaskSection
from hybrid.config.resolved_columns import Column, columns_of
from hybrid.config.validation import check_columns, check_fields
from hybrid.data.values.canonical import canonical_text
from hybrid.data.values.invalid_rows import shown
from hybrid.data.values.targets import TargetSpec
from hybrid.errors import ConfigError, DataError
from hybrid.storage.remote_path import StoragePath

CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))
CRITEO_SPARSE = tuple(f"C{i}" for i in range(1, 27))
CRITEO_LABEL = "label"
_NO_SECTIONS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Layout:
    """The columns of a file and how its fields are written.

    Attributes:
        data: the section that says so, with names for the columns of a format that has them.
        dense, sparse: the columns that the model reads, and how they are made.
        targets: labels, weights and groups.
        with_labels: whether the columns of targets are read (they may be absent otherwise).
        quotes: whether fields may be quoted with ``"``.
        others: the columns that are read in place of those, each after what names it; None for none.
        beside: columns that are read, too, and stay as they are in the files; each after what names it.
    """

    data: DataSection
    dense: tuple[Column, ...]
    sparse: tuple[Column, ...]
    targets: TargetSpec
    with_labels: bool
    quotes: bool
    others: tuple[tuple[str, str], ...] | None = None
    beside: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls,
        data: DataSection,
        columns: Mapping[str, ColumnSection] = _NO_SECTIONS,
        tasks: Mapping[str, TaskSection] = _NO_SECTIONS,
        *,
        with_labels: bool = True,
    ) -> Layout:
        """The layout that these sections describe; ConfigError where they contradict themselves."""
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
        made, targets = columns_of(data, columns), TargetSpec.of(tasks, data)
        return cls(data, *made, targets, with_labels, quotes=not is_criteo)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the columns of the files that are read."""
        return tuple(dict.fromkeys(name for _, name in self._named))

    @property
    def transforms(self) -> list[str]:
        """Of the dense columns."""
        return [column.transform for column in self.dense]

    def reading(self, names: Sequence[str], key: str) -> Layout:
        """The same files, of which the columns ``names`` are read, as ``key`` says."""
        return dataclasses.replace(self, others=tuple((key, name) for name in names))

    @property
    def columns_without_targets(self) -> tuple[str, ...]:
        """What is left of ``data.columns`` in a file that has no labels."""
        features = {source for column in (*self.dense, *self.sparse) for source in column.sources}
        targets = {name for _, name in self.targets.columns() if name not in features}
        return tuple(name for name in self.data.columns if name not in targets)

    def require(self, names: Sequence[str], path: StoragePath) -> None:
        """Check that ``path``, whose columns are ``names``, has every wanted one, once.

        Raises:
            ConfigError: it lacks one.
            DataError: it has one twice.
        """
        for key, name in self._named:
            if name not in names:
                nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
                hint = f"; did you mean {shown(nearest[0])}?" if nearest else ""
                raise ConfigError(key, f"{path} has no such column{hint}", name)
            if names.count(name) > 1:
                places = " and ".join(str(i) for i, each in enumerate(names, start=1) if each == name)
                rule = f"rename one, since {key} names it"
                raise DataError(f"{path}: columns {places} have the same name, {name!r}; {rule}")

    @property
    def _named(self) -> list[tuple[str, str]]:
        """Every wanted column after the key that names it."""
        if self.others is not None:
            return list(self.others)
        named = [(column.key("dense"), source) for column in self.dense for source in column.sources]
        named += [(column.key("sparse"), source) for column in self.sparse for source in column.sources]
        named += [("data.split", self.data.split_column)] if self.data.split_column else []
        named += self.targets.columns() if self.with_labels else []
        return [*named, *self.beside]

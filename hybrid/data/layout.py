"""Which columns a file has, and which of them are wanted."""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid.config import DataSection
from hybrid.data.bad_rows import shown
from hybrid.data.canonical import canonical_text
from hybrid.errors import ConfigError, DataError

CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))
CRITEO_SPARSE = tuple(f"C{i}" for i in range(1, 27))
CRITEO_LABEL = "label"


@dataclass(frozen=True)
class Layout:
    """The columns of a file and how its fields are written; see the data section for each.

    Attributes:
        columns: names by position; empty where the file names its own columns.
        with_labels: whether the label column is read (it may be absent otherwise).
        quotes: whether fields may be quoted with ``"``.
    """

    columns: tuple[str, ...]
    delimiter: str
    quotes: bool
    label: str
    with_labels: bool
    positive_labels: tuple[str, ...]
    negative_labels: tuple[str, ...]
    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    separator: str
    missing: tuple[str, ...]

    @classmethod
    def of(cls, data: DataSection, *, with_labels: bool = True) -> Layout:
        """The layout that ``data`` describes; ConfigError where it contradicts itself."""
        layout = cls(
            columns=data.columns,
            delimiter=data.delimiter,
            quotes=True,
            label=data.label,
            with_labels=with_labels,
            positive_labels=data.positive_labels,
            negative_labels=data.negative_labels,
            dense=data.dense,
            sparse=data.sparse,
            separator=data.multi_hot_separator,
            missing=data.missing,
        )
        if data.format == "criteo":
            layout = dataclasses.replace(
                layout,
                columns=(CRITEO_LABEL, *CRITEO_DENSE, *CRITEO_SPARSE),
                delimiter="\t",
                quotes=False,
                label=CRITEO_LABEL,
                dense=data.dense or CRITEO_DENSE,
                sparse=data.sparse or CRITEO_SPARSE,
                separator="",
            )
        layout._check()
        return layout

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the columns that are read."""
        return (*self.dense, *self.sparse, *([self.label] if self.with_labels else []))

    def require(self, names: Sequence[str], path: Path) -> None:
        """Check that ``path``, whose columns are ``names``, has every wanted one, once.

        Raises:
            ConfigError: it lacks one.
            DataError: it has one twice.
        """
        label = (self.label,) if self.with_labels else ()
        for key, wanted in (("dense", self.dense), ("sparse", self.sparse), ("label", label)):
            for name in wanted:
                if name not in names:
                    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
                    hint = f"; did you mean {shown(nearest[0])}?" if nearest else ""
                    raise ConfigError(f"data.{key}", f"{path} has no such column{hint}", name)
                if names.count(name) > 1:
                    places = " and ".join(str(i) for i, each in enumerate(names, start=1) if each == name)
                    rule = f"rename one, since data.{key} names it"
                    raise DataError(f"{path}: columns {places} have the same name, {name!r}; {rule}")

    def without_label(self) -> Layout:
        """The same for a file that lacks the label column."""
        return dataclasses.replace(self, columns=tuple(c for c in self.columns if c != self.label))

    def _check(self) -> None:
        if len(self.delimiter) != 1:
            raise ConfigError(
                "data.delimiter", "must be one character, such as a comma or a tab", self.delimiter
            )
        both = [n for n in self.negative_labels if _texts((n,)) & _texts(self.positive_labels)]
        if both:
            raise ConfigError("data.negative_labels", "a value is in data.positive_labels too", min(both))
        if self.with_labels and not self.positive_labels:
            raise ConfigError("data.positive_labels", "must name at least one label value")
        if not self.dense and not self.sparse:
            raise ConfigError("data.sparse", "must name at least one column (or data.dense must)")
        for key, names in (("columns", self.columns), ("dense", self.dense), ("sparse", self.sparse)):
            name, count = Counter(names).most_common(1)[0] if names else ("", 0)
            if count > 1:
                raise ConfigError(f"data.{key}", "names a column twice", name)
            if key != "columns" and self.label in names:
                raise ConfigError(f"data.{key}", "must not name the label", self.label)


def _texts(values: Sequence[str]) -> set[str]:
    return {canonical_text(value)[0] for value in values}

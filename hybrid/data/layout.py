"""Which columns a file has, and which of them are wanted."""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid.config import DataSection
from hybrid.config.rules import check_columns, check_fields
from hybrid.data.bad_rows import shown
from hybrid.data.canonical import canonical_text
from hybrid.errors import ConfigError, DataError

CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))
CRITEO_SPARSE = tuple(f"C{i}" for i in range(1, 27))
CRITEO_LABEL = "label"


@dataclass(frozen=True)
class Layout:
    """The columns of a file and how its fields are written.

    Attributes:
        data: the section that says so, with names for the columns of a format that has them.
        with_labels: whether the label column is read (it may be absent otherwise).
        quotes: whether fields may be quoted with ``"``.
    """

    data: DataSection
    with_labels: bool
    quotes: bool

    @classmethod
    def of(cls, data: DataSection, *, with_labels: bool = True) -> Layout:
        """The layout that ``data`` describes; ConfigError where it contradicts itself."""
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
        check_columns(data)
        return cls(data, with_labels, quotes=not is_criteo)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the columns that are read."""
        return (*self.data.dense, *self.data.sparse, *self._label)

    def require(self, names: Sequence[str], path: Path) -> None:
        """Check that ``path``, whose columns are ``names``, has every wanted one, once.

        Raises:
            ConfigError: it lacks one.
            DataError: it has one twice.
        """
        for key, wanted in (("dense", self.data.dense), ("sparse", self.data.sparse), ("label", self._label)):
            for name in wanted:
                if name not in names:
                    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
                    hint = f"; did you mean {shown(nearest[0])}?" if nearest else ""
                    raise ConfigError(f"data.{key}", f"{path} has no such column{hint}", name)
                if names.count(name) > 1:
                    places = " and ".join(str(i) for i, each in enumerate(names, start=1) if each == name)
                    rule = f"rename one, since data.{key} names it"
                    raise DataError(f"{path}: columns {places} have the same name, {name!r}; {rule}")

    @property
    def _label(self) -> tuple[str, ...]:
        return (self.data.label,) if self.with_labels else ()

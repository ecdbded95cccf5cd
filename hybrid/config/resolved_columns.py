"""The columns that a model reads: data.dense and data.sparse, resolved with [columns.NAME]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from hybrid.config.data_sections import (
    DEFAULT_HASH_ROWS,
    KIND_CALLS,
    SCALING_CALLS,
    UNPOOLED,
    VOCABULARY_CALLS,
    ColumnSection,
    DataSection,
)
from hybrid.errors import ConfigError

_OF_IDS = ("multi_hot_separator", "max_ids", "too_many_ids", "pooling", "vocabulary")
# The keys besides "kind" and "source" that are read of a column of data.sparse, by its kind.
_KEYS: dict[str, tuple[str, ...]] = {"value": _OF_IDS, "weighted": _OF_IDS, "cross": ("vocabulary",)}
_KEYS_OF_DENSE = ("numeric_scaling",)
_DEFAULTS = ColumnSection()


@dataclass(frozen=True)
class Column:
    """One column of the model, with every key resolved; see :class:`ColumnSection`."""

    name: str
    sources: tuple[str, ...]
    kind: str
    bounds: tuple[float, ...]
    quantiles: int
    weight_separator: str
    separator: str
    max_ids: int
    too_many_ids: str
    transform: str
    scaling: str
    vocabulary: str
    min_count: int
    hash_rows: int

    @property
    def source(self) -> str:
        """The column of the files, of a column that has one source."""
        (source,) = self.sources
        return source

    def key(self, list_name: str) -> str:
        """The key that names the sources: data.dense or data.sparse, unless a section does."""
        return f"data.{list_name}" if self.sources == (self.name,) else f"columns.{self.name}.source"


def columns_of(
    data: DataSection, sections: Mapping[str, ColumnSection]
) -> tuple[tuple[Column, ...], tuple[Column, ...]]:
    """Return the columns of data.dense and those of data.sparse.

    Raises:
        ConfigError: a section names no column, or its keys contradict each other.
    """
    for name, section in sections.items():
        if name in data.dense and name in data.sparse:
            rule = "is in data.dense and in data.sparse; rename it in one, with a source"
            raise ConfigError(f"columns.{name}", rule)
        if name not in data.dense and name not in data.sparse:
            raise ConfigError(f"columns.{name}", "is in neither data.dense nor data.sparse")
        _check(name, section, name in data.dense)
    dense = tuple(_column(data, sections, name) for name in data.dense)
    sparse = tuple(_column(data, sections, name) for name in data.sparse)
    for column in sparse:
        if column.kind == "weighted" and column.weight_separator in ("", column.separator):
            rule = "separator must not be empty, nor be what separates ids"
            raise ConfigError(f"columns.{column.name}.kind", rule, sections[column.name].kind)
    return dense, sparse


def sequence_length(name: str, section: ColumnSection) -> int:
    """Return the length of a sequence column; 0 if its bags are pooled.

    Raises:
        ConfigError: the section has no ``max_ids``.
    """
    if section.pooling == UNPOOLED and not section.max_ids:
        rule = f"must be the number of vectors that the net gets, since columns.{name}.pooling is {UNPOOLED}"
        raise ConfigError(f"columns.{name}.max_ids", rule, section.max_ids)
    return section.max_ids if section.pooling == UNPOOLED else 0


def _column(data: DataSection, sections: Mapping[str, ColumnSection], name: str) -> Column:
    section = sections.get(name, _DEFAULTS)
    key = f"columns.{name}"
    kind = KIND_CALLS.parse(f"{key}.kind", section.kind)
    separator = section.multi_hot_separator
    scaling = SCALING_CALLS.parse(f"{key}.numeric_scaling", section.numeric_scaling or data.numeric_scaling)
    vocabulary = VOCABULARY_CALLS.parse(f"{key}.vocabulary", section.vocabulary or data.vocabulary)
    return Column(
        name=name,
        sources=section.source or (name,),
        kind="buckets" if kind.name == "quantiles" else kind.name,
        bounds=kind.arguments.get("bounds", ()),
        quantiles=kind.arguments.get("buckets", 0),
        weight_separator=kind.arguments.get("separator", ":"),
        separator=data.multi_hot_separator if separator is None else separator,
        max_ids=section.max_ids,
        too_many_ids=section.too_many_ids,
        transform="log" if scaling["log"] else "none",
        scaling=scaling.name,
        vocabulary=vocabulary.name,
        min_count=vocabulary.arguments.get("min_count", 1),
        hash_rows=vocabulary.arguments.get("rows", DEFAULT_HASH_ROWS),
    )


def _check(name: str, section: ColumnSection, is_dense: bool) -> None:
    call = KIND_CALLS.parse(f"columns.{name}.kind", section.kind)
    kind = call.name
    if is_dense and kind != "value":
        rule = "must be value for a column of data.dense; name it in data.sparse instead"
        raise ConfigError(f"columns.{name}.kind", rule, section.kind)
    what = "a column of data.dense" if is_dense else f"a column of data.sparse whose kind is {kind}"
    for key in vars(_DEFAULTS):
        value = getattr(section, key)
        read = ("kind", "source", *(_KEYS_OF_DENSE if is_dense else _KEYS.get(kind, ())))
        if key not in read and value != getattr(_DEFAULTS, key):
            raise ConfigError(f"columns.{name}.{key}", f"does not apply to {what}", value)
    if kind == "cross" and len(section.source) < 2:
        raise ConfigError(f"columns.{name}.source", "must name two columns or more (cross)", section.source)
    if kind == "cross" and section.vocabulary and not section.vocabulary.startswith("hash"):
        raise ConfigError(f"columns.{name}.vocabulary", "must be hash (cross)", section.vocabulary)
    if kind != "cross" and len(section.source) > 1:
        raise ConfigError(f"columns.{name}.source", f"must be one column, for {what}", section.source)
    if len(set(section.source)) < len(section.source):
        raise ConfigError(f"columns.{name}.source", "must name each column once", section.source)
    for low, high in pairwise(call.arguments.get("bounds", ())):
        if not low < high:
            rule = f"bounds must rise from each to the next, and {high:g} comes after {low:g}"
            raise ConfigError(f"columns.{name}.kind", rule, section.kind)
    sequence_length(name, section)

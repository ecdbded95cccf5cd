"""Names of tensors elsewhere, and names of tables here: ``embedding_bags.*.weight=*``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hybrid.errors import ConfigError

OPTION = "--map"
_MOST_SHOWN = 10


@dataclass(frozen=True, slots=True)
class NameMap:
    """Pairs of patterns, of a name elsewhere and of a table; a ``*`` stands for the same text in both.

    Attributes:
        pairs: in the order in which they are given.
    """

    pairs: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, texts: Iterable[str]) -> NameMap:
        """Of ``ELSEWHERE=TABLE`` each.

        Raises:
            ConfigError: one is no pair, or has a ``*`` on one side only.
        """
        pairs = []
        for text in texts:
            elsewhere, equals, table = text.partition("=")
            if not (equals and elsewhere and table) or elsewhere.count("*") != table.count("*"):
                rule = "must be NAME=TABLE, with as many * on the left as on the right"
                raise ConfigError(OPTION, rule, text)
            pairs.append((elsewhere, table))
        return cls(tuple(pairs))

    def sources(self, names: Iterable[str], tables: Iterable[str], where: str) -> dict[str, str]:
        """The name elsewhere of each table that is taken from there.

        Args:
            names: those that there are elsewhere.
            tables: those that there are here.
            where: the file that has the names, for errors.

        Raises:
            ConfigError: a pair names nothing, no table of these, or one that another names too.
        """
        found: dict[str, str] = {}
        names, tables = list(names), set(tables)
        for elsewhere, table_pattern in self.pairs:
            for name, table in _renamed(elsewhere, table_pattern, names, where):
                if table not in tables:
                    rule = f"makes {name!r} table {table!r}, and there are {_listed(tables)}"
                    raise ConfigError(OPTION, rule, f"{elsewhere}={table_pattern}")
                if found.setdefault(table, name) != name:
                    rule = f"makes both {found[table]!r} and {name!r} table {table!r}"
                    raise ConfigError(OPTION, rule, f"{elsewhere}={table_pattern}")
        return found

    def names(self, tables: Iterable[str]) -> dict[str, str]:
        """What each table is called elsewhere; those that no pair names keep their names.

        Raises:
            ConfigError: a pair names no table, or two tables are to have one name.
        """
        tables = list(tables)
        found: dict[str, str] = {}
        for elsewhere, table_pattern in self.pairs:
            for table, name in _renamed(table_pattern, elsewhere, tables, "the model"):
                found.setdefault(table, name)
        found = {table: found.get(table, table) for table in tables}
        taken: dict[str, str] = {}
        for table, name in found.items():
            if taken.setdefault(name, table) != table:
                raise ConfigError(OPTION, f"calls both {taken[name]!r} and {table!r} {name!r}")
        return found


def _renamed(pattern: str, other: str, names: Iterable[str], where: str) -> list[tuple[str, str]]:
    """The names that a pattern fits, and what the other side of the pair makes of each."""
    fits = re.compile("(.+)".join(map(re.escape, pattern.split("*"))), re.DOTALL)
    found = []
    for name in names:
        if (match := fits.fullmatch(name)) is not None:
            first, *parts = other.split("*")
            filled = [text + part for text, part in zip(match.groups(), parts, strict=True)]
            found.append((name, first + "".join(filled)))
    if not found:
        raise ConfigError(OPTION, f"fits none of the names in {where}: {_listed(names)}", pattern)
    return found


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _MOST_SHOWN} more" if len(ordered) > _MOST_SHOWN else ""
    return ", ".join(ordered[:_MOST_SHOWN]) + more or "none"

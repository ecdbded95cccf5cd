"""Names of tensors in other programs and names of tables here: ``embedding_bags.*.weight=*``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hybrid.errors import ConfigError

_OPTION = "--map"
_MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class NameMap:
    """Pairs of a pattern for tensors and a pattern for tables; a ``*`` is the same text on both sides."""

    pairs: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, texts: Iterable[str]) -> NameMap:
        """Read ``TENSOR=TABLE`` texts; ConfigError for anything else."""
        pairs = []
        for text in texts:
            tensor, equals, table = text.partition("=")
            if not (equals and tensor and table) or tensor.count("*") != table.count("*"):
                rule = "must be NAME=TABLE, with as many * on the left as on the right"
                raise ConfigError(_OPTION, rule, text)
            pairs.append((tensor, table))
        return cls(tuple(pairs))

    def match_tables(self, tensors: Iterable[str], tables: Iterable[str], file: str) -> dict[str, str]:
        """Return the name of the tensor for each table that has one.

        Args:
            file: where the tensors are, for errors.

        Raises:
            ConfigError: a pair matches no tensor, an unknown table, or the table of another pair.
        """
        matches: dict[str, str] = {}
        tensors, tables = list(tensors), set(tables)
        for pair in self.pairs:
            for tensor, table in _match(*pair, tensors, file):
                if table not in tables:
                    rule = f"maps {tensor!r} to table {table!r}, but the tables are {_list(tables)}"
                    raise ConfigError(_OPTION, rule, "=".join(pair))
                if matches.setdefault(table, tensor) != tensor:
                    rule = f"maps both {matches[table]!r} and {tensor!r} to table {table!r}"
                    raise ConfigError(_OPTION, rule, "=".join(pair))
        return matches

    def rename_tables(self, tables: Iterable[str]) -> dict[str, str]:
        """Return the name of the tensor for each table; tables that no pair matches keep their names.

        Raises:
            ConfigError: a pair matches no table, or two tables would have the same name.
        """
        tables = list(tables)
        names = {table: table for table in tables}
        for tensor_pattern, table_pattern in reversed(self.pairs):  # the first pair that matches applies
            names |= _match(table_pattern, tensor_pattern, tables, "the model")
        for table, name in names.items():
            if others := [other for other in tables if other != table and names[other] == name]:
                raise ConfigError(_OPTION, f"gives both {table!r} and {others[0]!r} the name {name!r}")
        return names


def _match(pattern: str, target: str, names: list[str], file: str) -> list[tuple[str, str]]:
    """Return the names that match a pattern, each with ``target`` filled in."""
    regex = re.compile("(.+)".join(map(re.escape, pattern.split("*"))), re.DOTALL)
    matches = [(name, match.groups()) for name in names if (match := regex.fullmatch(name))]
    if not matches:
        raise ConfigError(_OPTION, f"matches none of the names in {file}: {_list(names)}", pattern)
    fill = target.replace("%", "%%").replace("*", "%s")
    return [(name, fill % groups) for name, groups in matches]


def _list(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_SHOWN} more" if len(ordered) > _MAX_SHOWN else ""
    return ", ".join(ordered[:_MAX_SHOWN]) + more or "none"

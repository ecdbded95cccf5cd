"""Few combinations of many choices in which any two values meet, or each stands once."""

import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
Meeting: TypeAlias = tuple[tuple[str, Any], ...]

_CANDIDATES = 60


def covering_rows(choices: Mapping[str, Sequence[Any]], strength: int = 2) -> list[Row]:
    """Rows with one value of each choice; any ``strength`` values of different choices stand in one of them.

    Greedy: each row is the best of some that are drawn around a meeting not covered yet. The same choices
    give the same rows.
    """
    generator = random.Random(1)
    missing = {
        tuple(zip(names, values, strict=True))
        for names in itertools.combinations(choices, strength)
        for values in itertools.product(*(choices[name] for name in names))
    }
    rows = []
    while missing:
        # Sorted, since the order of a set of texts differs from process to process.
        fixed = dict(min(missing, key=repr))
        candidates = [
            {name: generator.choice(values) for name, values in choices.items()} | fixed
            for _ in range(_CANDIDATES)
        ]
        best = max((_improved(row, choices, missing, fixed) for row in candidates), key=lambda r: r[1])[0]
        rows.append(best)
        missing -= _meetings(best, strength)
    return rows


def _improved(
    row: Row, choices: Mapping[str, Sequence[Any]], missing: set[Meeting], fixed: Collection[str]
) -> tuple[Row, int]:
    """The row with each free choice replaced, one after another, by what covers most; and how much."""
    strength = len(fixed)
    for name in choices:
        if name not in fixed:
            tried = ({**row, name: value} for value in choices[name])
            row = max(tried, key=lambda each: sum(m in missing for m in _meetings_with(name, each, strength)))
    return row, len(_meetings(row, strength) & missing)


def _meetings(row: Row, strength: int) -> set[Meeting]:
    return set(itertools.combinations(row.items(), strength))


def _meetings_with(name: str, row: Row, strength: int) -> Iterator[Meeting]:
    """Those that a choice is part of: the others are the same whatever its value."""
    items, place = [*row.items()], [*row].index(name)
    for before in range(strength):
        for head in itertools.combinations(items[:place], before):
            for tail in itertools.combinations(items[place + 1 :], strength - 1 - before):
                yield *head, items[place], *tail

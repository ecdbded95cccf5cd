"""Few combinations of many choices in which every two values of two choices meet."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
Pair: TypeAlias = tuple[str, Any, str, Any]

_CANDIDATES = 60


def pairwise_rows(choices: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Rows with one value of each choice; each pair of values of two choices stands in one of them.

    Greedy: each row is the best of some that are drawn around a pair not covered yet. The same choices
    give the same rows.
    """
    generator = random.Random(1)
    missing = {
        (a, x, b, y)
        for (a, xs), (b, ys) in itertools.combinations(choices.items(), 2)
        for x, y in itertools.product(xs, ys)
    }
    rows = []
    while missing:
        # Sorted, since the order of a set of texts differs from process to process.
        a, x, b, y = min(missing, key=repr)
        candidates = [
            {name: generator.choice(values) for name, values in choices.items()} | {a: x, b: y}
            for _ in range(_CANDIDATES)
        ]
        best = max((_improved(row, choices, missing, {a, b}) for row in candidates), key=lambda r: r[1])[0]
        rows.append(best)
        missing -= _pairs(best)
    return rows


def _improved(
    row: Row, choices: Mapping[str, Sequence[Any]], missing: set[Pair], fixed: set[str]
) -> tuple[Row, int]:
    """The row with each free choice replaced, one after another, by what covers most; and how much."""
    for name in choices:
        if name not in fixed:
            row = max(({**row, name: value} for value in choices[name]), key=lambda r: _covered(r, missing))
    return row, _covered(row, missing)


def _pairs(row: Row) -> set[Pair]:
    return {(a, x, b, y) for (a, x), (b, y) in itertools.combinations(row.items(), 2)}


def _covered(row: Row, missing: set[Pair]) -> int:
    return len(_pairs(row) & missing)

"""Few combinations of many choices."""

import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Pair: TypeAlias = tuple[tuple[str, Any], tuple[str, Any]]


def covering_rows(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return few rows with one value of each choice, such that any two values occur together in one.

    Greedy: each row is the best of 60 that contain a pair not covered yet. Deterministic.
    """

    def pairs_with(name: str, row: Mapping[str, Any]) -> Iterator[Pair]:
        items, index = [*row.items()], [*row].index(name)
        yield from ((item, items[index]) for item in items[:index])
        yield from ((items[index], item) for item in items[index + 1 :])

    def num_new(row: Mapping[str, Any]) -> int:
        return len(missing.intersection(itertools.combinations(row.items(), 2)))

    def improve(row: dict[str, Any], fixed: Collection[str]) -> dict[str, Any]:
        for name in (each for each in choices if each not in fixed):
            tried = ({**row, name: value} for value in choices[name])
            row = max(tried, key=lambda each: sum(pair in missing for pair in pairs_with(name, each)))
        return row

    generator = random.Random(1)
    missing: set[Pair] = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(choices, 2)
        for a, b in itertools.product(choices[one], choices[other])
    }
    rows = []
    while missing:
        fixed = dict(min(missing, key=repr))  # a set of texts has another order in each process
        drawn = [{n: generator.choice(values) for n, values in choices.items()} | fixed for _ in range(60)]
        rows.append(max((improve(row, fixed) for row in drawn), key=num_new))
        missing.difference_update(itertools.combinations(rows[-1].items(), 2))
    return rows

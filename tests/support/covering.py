"""Few combinations of many choices."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def covering_rows(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return few rows with one value of each choice, such that any two values occur together in one.

    Greedy: each row is the best of 60 random ones that contain a pair not covered yet. Deterministic.
    """
    generator = random.Random(1)
    missing = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(choices, 2)
        for a, b in itertools.product(choices[one], choices[other])
    }
    rows = []
    while missing:
        fixed = dict(min(missing, key=repr))  # a set of texts has another order in each process
        drawn = [{n: generator.choice(values) for n, values in choices.items()} | fixed for _ in range(60)]
        rows.append(
            max(drawn, key=lambda row: len(missing.intersection(itertools.combinations(row.items(), 2))))
        )
        missing.difference_update(itertools.combinations(rows[-1].items(), 2))
    return rows

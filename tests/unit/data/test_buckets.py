"""Quantiles of columns given in blocks, exact and summarised, and the buckets that numbers fall into."""

import numpy as np
import numpy.typing as npt
import pytest

from hybrid.data.values import scaling
from hybrid.data.values.scaling import Quantiles, bucket_of


def bounds_of(numbers: npt.ArrayLike, count: int, parts: int = 3) -> tuple[float, ...]:
    found = Quantiles()
    for part in np.array_split(np.asarray(numbers, np.float64), parts):
        found.add(part)
    return found.bounds(count)


def test_buckets_of_numbers_that_all_differ_are_of_equal_size() -> None:
    numbers = np.random.default_rng(0).permutation(np.arange(1200.0))
    assert bounds_of(numbers, 4) == (300, 600, 900)
    sizes = np.bincount(bucket_of(numbers, bounds_of(numbers, 7)))
    assert sizes[0] == 0
    assert set(sizes[1:].tolist()) <= {171, 172}


def test_numbers_that_are_alike_make_fewer_buckets() -> None:
    assert bounds_of([0.0] * 90 + [1.0] * 5 + [7.0] * 5, 10) == (1.0,)
    assert bounds_of([3.0] * 10, 5) == ()
    assert bounds_of([], 5) == ()


def test_a_bound_belongs_to_the_bucket_above_it_and_missing_numbers_to_none() -> None:
    numbers = np.array([-np.inf, 0.999, 1.0, 1.5, 2.0, 1e300, np.nan])
    assert bucket_of(numbers, (1.0, 2.0)).tolist() == [1, 1, 2, 2, 3, 3, 0]
    assert bucket_of(numbers, ()).tolist() == [1] * 6 + [0]
    assert bucket_of(numbers, ()).dtype == np.int32


@pytest.mark.parametrize("sort", [False, True])
def test_more_numbers_than_are_kept_are_within_the_bound_that_is_stated(
    monkeypatch: pytest.MonkeyPatch, sort: bool
) -> None:
    monkeypatch.setattr(scaling, "MAX_KEPT", kept := 4096)
    numbers = np.random.default_rng(1).lognormal(size=200_000)
    if sort:  # the worst order: each block is beyond those before it
        numbers.sort()
    found = Quantiles()
    for part in np.array_split(numbers, 41):
        found.add(part)
        assert len(found._values) <= kept
    numbers.sort()
    ranks = np.searchsorted(numbers, found.bounds(20)) / len(numbers)
    allowed = len(numbers) / (4 * (kept / 2) ** 2) + 1 / kept
    # What one replacement moves up another mostly moves down: half a step to one side would come near it.
    assert np.abs(ranks - np.arange(1, 20) / 20).max() <= allowed / 4
    few = Quantiles()
    few.add(numbers[:kept])
    assert few.bounds(4) == tuple(numbers[[1024, 2048, 3072]])

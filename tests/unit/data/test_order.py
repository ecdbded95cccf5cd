"""The orders of an epoch: every row once, for any number of trainers, and how far rows move."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hybrid.batch import slice_bounds
from hybrid.data.dataset.sample_order import LaneOrder, Order, ShuffledOrder

WINDOWS = {"chunk_rows": 8, "window_chunks": 6}


def steps_of(order: Order, num_rows: int, batch_size: int) -> list[list[int]]:
    bounds = itertools.pairwise([*range(0, num_rows, batch_size), num_rows])
    return [order.indices(start, stop).tolist() for start, stop in bounds]


@settings(max_examples=150, deadline=None)
@given(
    num_rows=st.integers(1, 400),
    num_lanes=st.integers(1, 20),
    batch_size=st.integers(1, 70),
    seed=st.integers(0, 2**32),
    first=st.integers(0, 400),
)
def test_by_lanes_every_row_comes_once_and_any_step_can_be_had_alone(
    num_rows: int, num_lanes: int, batch_size: int, seed: int, first: int
) -> None:
    def order() -> LaneOrder:
        return LaneOrder(num_lanes, num_rows, seed, 3, **WINDOWS)

    steps = steps_of(order(), num_rows, batch_size)
    assert all(len(step) == batch_size for step in steps[:-1])
    assert sorted(itertools.chain(*steps)) == list(range(num_rows))
    first = min(first // batch_size, len(steps) - 1)
    start = first * batch_size
    assert order().indices(start, min(start + batch_size, num_rows)).tolist() == steps[first]


@settings(max_examples=60, deadline=None)
@given(num_lanes=st.integers(1, 130), position=st.integers(0, 10**12), size=st.integers(0, 5000))
def test_each_lane_gives_a_step_as_many_rows_as_any_other(num_lanes: int, position: int, size: int) -> None:
    order = LaneOrder(num_lanes, 1, 1, 1)
    given_L = order._given_L(position + size) - order._given_L(position)
    assert given_L.sum() == size
    assert given_L.max() - given_L.min() <= 1
    # Neighbours together have their share of the rows, but for a few: so a trainer's share is of its lanes.
    expected_L = np.arange(1, num_lanes + 1) * size / num_lanes
    assert np.abs(given_L.cumsum() - expected_L).max() <= 4


def read_by(order: Order, num_rows: int, batch_size: int, num_shares: int) -> list[set[int]]:
    """The chunks of WINDOWS that each share of an epoch has rows of."""
    read: list[set[int]] = [set() for _ in range(num_shares)]
    for rows in steps_of(order, num_rows, batch_size):
        for index, chunks in enumerate(read):
            start, stop = slice_bounds(len(rows), index, num_shares)
            chunks.update(row // WINDOWS["chunk_rows"] for row in rows[start:stop])
    return read


@pytest.mark.parametrize("batch_size", [12, 64, 100])
@pytest.mark.parametrize("num_shares", [1, 2, 3, 4])
def test_by_lanes_a_share_reads_little_more_than_its_part_of_the_chunks(
    num_shares: int, batch_size: int
) -> None:
    num_rows, windows = 48 * 8 * 20, {"chunk_rows": 8, "window_chunks": 48}
    lanes = read_by(LaneOrder(24, num_rows, 1, 0, **windows), num_rows, batch_size, num_shares)
    assert max(map(len, lanes)) <= (1 / num_shares + 2 / 24) * num_rows / 8
    plain = read_by(ShuffledOrder(num_rows, 1, 0, **windows), num_rows, 100, num_shares)
    assert min(map(len, plain)) > 0.85 * num_rows / 8


def test_lanes_are_of_other_chunks_in_each_epoch_and_mixed_within() -> None:
    num_rows = 6 * 4096
    first, second = (LaneOrder(2, num_rows, 1, epoch).indices(0, num_rows) for epoch in (0, 1))
    half = num_rows // 2
    assert set(first[:half] // 4096) != set(second[:half] // 4096)
    assert abs(np.corrcoef(first[:half], np.arange(half))[0, 1]) < 0.1
    assert len(np.unique(first[:64] // 4096)) == 3, "a few rows come from all chunks of a lane"

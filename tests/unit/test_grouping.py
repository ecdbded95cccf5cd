"""Slices of complete groups, and the weights of samples in ranking losses."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hybrid.batch import slice_bounds
from hybrid.primitives.grouping import group_bounds, group_ends, last_end, ranking_totals, ranking_weights

sizes_of_groups = st.lists(st.integers(1, 6), max_size=12)


def test_bounds_of_groups() -> None:
    groups = np.array([7, 7, 7, 2, 5, 5, 5, 5, 3])
    ends = group_ends(groups)
    assert ends.tolist() == [3, 4, 8, 9]
    assert [group_bounds(ends, *each) for each in ((0, 3), (3, 6), (6, 9))] == [(0, 3), (3, 4), (4, 9)]
    assert [last_end(ends, stop) for stop in range(10)] == [0, 0, 0, 3, 4, 4, 4, 4, 8, 9]
    assert group_ends(groups[:0]).tolist() == []
    assert group_bounds(group_ends(groups[:0]), 0, 0) == (0, 0)


@given(sizes_of_groups, st.integers(1, 5))
def test_slices_have_each_sample_once_and_complete_groups(sizes: list[int], parts: int) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    ends = group_ends(groups)
    even = [slice_bounds(len(groups), part, parts) for part in range(parts)]
    bounds = [group_bounds(ends, *each) for each in even]
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(len(groups)))
    of_parts = [set(groups[start:stop].tolist()) for start, stop in bounds]
    assert sum(map(len, of_parts)) == len(sizes)
    for (start, stop), (first, last) in zip(even, bounds, strict=True):
        assert {*groups[first:last].tolist()} == {groups[e - 1] for e in ends if start <= e - 1 < stop}


def test_group_has_the_mean_weight_of_its_samples() -> None:
    groups = torch.tensor([5, 5, 5, 5, 9, 9, 3, 2, 2, 2])
    labels = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1, 0, 0])
    weights = torch.tensor([2.0, 4, 0, 3, 1, 1, 1, 7, 0, 0])
    # Of 5 three samples count, of mean weight 3; 9 and 3 have one label, and so has 2 among those that count.
    expected = torch.tensor([1.0, 1, 0, 1, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    assert torch.equal(ranking_weights(labels, weights, groups), expected)
    alike = torch.tensor([0.25] * 4 + [0] * 3 + [1 / 3] * 3, dtype=torch.float64)
    torch.testing.assert_close(ranking_weights(labels, None, groups), alike)
    two_labels = torch.stack([labels, 0 * labels], dim=1)
    assert ranking_totals(two_labels, weights[:, None].expand(-1, 2), groups).tolist() == [3, 0]
    assert ranking_totals(labels[:, None], None, groups).tolist() == [pytest.approx(2)]
    assert ranking_totals(labels[:0, None], None, groups[:0]).tolist() == [0]

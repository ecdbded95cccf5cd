"""Micro-batches hold the samples of a batch, each once and in order; slices of complete groups."""

from itertools import chain, pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from support.samples import features_of_bags

from hybrid.batch import Batch, SparseFeatures, slice_bounds
from hybrid.primitives.grouping import group_bounds, group_ends, last_end, ranking_totals, ranking_weights

NUM_DENSE = 2


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Of any number of samples, with one id a sample or with bags, weighted or not."""
    num_features, size = draw(st.integers(1, 3)), draw(st.integers(0, 7))
    has_one_id = draw(st.booleans())
    lengths = st.integers(1, 1) if has_one_id else st.integers(0, 3)
    bags = [[list(range(draw(lengths))) for _ in range(size)] for _ in range(num_features)]
    weights = [[[draw(st.floats(-1, 1, width=32)) for _ in bag] for bag in feature] for feature in bags]
    sparse = features_of_bags(bags, weights if draw(st.booleans()) else None)
    sparse = sparse._replace(ids_L=torch.arange(len(sparse.ids_L)))
    if has_one_id:
        sparse = sparse._replace(offsets=None)
    dense_BF = torch.arange(float(NUM_DENSE * size)).view(size, NUM_DENSE)
    batch = Batch(dense_BF, sparse, torch.arange(float(size)) / 8, 99)
    if draw(st.booleans()):
        totals = torch.ones(1, dtype=torch.float64)
        batch = batch._replace(
            weights=torch.arange(float(size)), total_weights=totals, groups=torch.arange(size)
        )
    return batch


Bag = list[tuple[int, float]]


def bags_of(sparse: SparseFeatures) -> list[list[Bag]]:
    """The ids and weights of each sample, feature by feature."""
    offsets = torch.arange(len(sparse.ids_L) + 1) if sparse.offsets is None else sparse.offsets
    weights_L = torch.ones(len(sparse.ids_L)) if sparse.weights_L is None else sparse.weights_L
    entries = list(zip(sparse.ids_L.tolist(), weights_L.tolist(), strict=True))
    bags = [entries[start:stop] for start, stop in pairwise(offsets.tolist())]
    size = sparse.batch_size
    return [bags[k * size : (k + 1) * size] for k in range(sparse.num_features)]


@given(batches(), st.integers(1, 9))
def test_micro_batches_hold_all_samples_in_order(batch: Batch, num_parts: int) -> None:
    parts = batch.split(num_parts)
    assert len(parts) == num_parts
    sizes = [len(part.labels) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([p.dense_features for p in parts]), batch.dense_features)
    assert torch.equal(torch.cat([p.labels for p in parts]), batch.labels)
    for name in ("weights", "groups"):
        of_parts, of_whole = [getattr(part, name) for part in parts], getattr(batch, name)
        if of_whole is None:
            assert of_parts == [None] * num_parts
        else:
            assert torch.equal(torch.cat(of_parts), of_whole)
    whole = bags_of(batch.sparse_features)
    for k in range(batch.sparse_features.num_features):
        assert list(chain.from_iterable(bags_of(p.sparse_features)[k] for p in parts)) == whole[k]
    for part in parts:
        assert part.global_size == batch.global_size
        assert part.total_weights is batch.total_weights
        assert (part.sparse_features.offsets is None) == (batch.sparse_features.offsets is None)
        assert (part.sparse_features.weights_L is None) == (batch.sparse_features.weights_L is None)


@given(batches(), st.integers(1, 9), st.data())
def test_micro_batches_keep_groups_whole(batch: Batch, num_parts: int, data: st.DataObject) -> None:
    steps = [data.draw(st.integers(0, 1)) for _ in batch.labels]
    groups = torch.tensor(steps, dtype=torch.int64).cumsum(0)
    batch = batch._replace(groups=groups, total_ranking_weights=torch.ones(1, dtype=torch.float64))
    parts = batch.split(num_parts)
    assert len(parts) == num_parts
    found = [part.groups for part in parts if part.groups is not None]
    assert torch.equal(torch.cat(found), groups)
    assert sum(len(each.unique()) for each in found) == len(groups.unique())
    for part in parts:
        assert part.total_ranking_weights is batch.total_ranking_weights


def described(batch: Batch) -> list[object]:
    """What each sample is, but for its label and the order of its ids."""
    bags = bags_of(batch.sparse_features)
    return [
        (tuple(dense), tuple(tuple(sorted(feature[sample])) for feature in bags))
        for sample, dense in enumerate(batch.dense_features.tolist())
    ]


@given(batches(), st.data())
def test_row_keys_are_equal_for_equal_samples(batch: Batch, data: st.DataObject) -> None:
    """Few values, so that many are; 0.0 and -0.0 are equal."""
    sparse = batch.sparse_features
    values = st.sampled_from([0.0, -0.0, 1.0])
    dense_BF = torch.tensor([data.draw(values) for _ in range(batch.dense_features.numel())])
    ids_L = torch.tensor([data.draw(st.integers(0, 2)) for _ in sparse.ids_L], dtype=torch.int64)
    if sparse.weights_L is not None:
        weights_L = torch.tensor([data.draw(st.sampled_from([1.0, 2.0])) for _ in sparse.ids_L])
        sparse = sparse._replace(weights_L=weights_L)
    batch = batch._replace(
        dense_features=dense_BF.view_as(batch.dense_features), sparse_features=sparse._replace(ids_L=ids_L)
    )
    keys, samples = batch.feature_hashes().tolist(), described(batch)
    assert len(keys) == len(samples)
    for i, j in product(range(len(keys)), repeat=2):
        assert (keys[i] == keys[j]) == (samples[i] == samples[j])
    assert [key for part in batch.split(3) for key in part.feature_hashes().tolist()] == keys


def test_row_keys_depend_on_the_order_of_sequences() -> None:
    bags = [[[1, 2], [2, 1], [1, 2], [1], [1, 1]], [[3, 4], [3, 4], [4, 3], [], []]]
    sparse = features_of_bags(bags)
    batch = Batch(torch.zeros(5, NUM_DENSE), sparse, torch.zeros(5), 5)

    def which_are_equal(*sequences: int) -> list[int]:
        keys = batch.feature_hashes(sequences).tolist()
        return [keys.index(key) for key in keys]

    assert which_are_equal() == [0, 0, 0, 3, 4]
    assert which_are_equal(0) == [0, 1, 0, 3, 4]
    assert which_are_equal(1) == [0, 0, 2, 3, 4]
    assert which_are_equal(0, 1) == [0, 1, 2, 3, 4]
    parts = [key for part in batch.split(3) for key in part.feature_hashes((0, 1)).tolist()]
    assert parts == batch.feature_hashes((0, 1)).tolist()


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

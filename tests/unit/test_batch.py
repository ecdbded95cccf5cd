"""Micro-batches: the parts of a batch hold its samples, each once and in order."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.batch import Batch, SparseFeatures
from hybrid.errors import DataError

NUM_DENSE = 2


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Of any number of samples, with one id a sample or with bags, weighted or not."""
    num_features, size = draw(st.integers(1, 3)), draw(st.integers(0, 7))
    has_one_id = draw(st.booleans())
    lengths = st.integers(1, 1) if has_one_id else st.integers(0, 3)
    bags = [[list(range(draw(lengths))) for _ in range(size)] for _ in range(num_features)]
    weights = [[[draw(st.floats(-1, 1, width=32)) for _ in bag] for bag in feature] for feature in bags]
    sparse = SparseFeatures.from_bags(bags, weights if draw(st.booleans()) else None)
    sparse = sparse._replace(ids_L=torch.arange(len(sparse.ids_L)))
    if has_one_id and sparse.weights_L is None:
        sparse = sparse._replace(offsets=None)
    dense_BF = torch.arange(float(NUM_DENSE * size)).view(size, NUM_DENSE)
    return Batch(dense_BF, sparse, torch.arange(float(size)), 99, draw(st.booleans()))


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
def test_the_parts_of_a_batch_are_the_whole(batch: Batch, num_parts: int) -> None:
    parts = batch.split(num_parts)
    assert len(parts) == num_parts
    sizes = [len(part.labels) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([p.dense_features for p in parts]), batch.dense_features)
    assert torch.equal(torch.cat([p.labels for p in parts]), batch.labels)
    whole = bags_of(batch.sparse_features)
    for k in range(batch.sparse_features.num_features):
        assert list(chain.from_iterable(bags_of(p.sparse_features)[k] for p in parts)) == whole[k]
    for part in parts:
        part.check(NUM_DENSE, batch.sparse_features.num_features)
        assert (part.global_size, part.ended) == (batch.global_size, batch.ended)
        assert (part.sparse_features.offsets is None) == (batch.sparse_features.offsets is None)
        assert (part.sparse_features.weights_L is None) == (batch.sparse_features.weights_L is None)


@given(batches(), st.data())
def test_any_samples_in_a_row(batch: Batch, data: st.DataObject) -> None:
    size = len(batch.labels)
    start, stop = sorted([data.draw(st.integers(0, size)), data.draw(st.integers(0, size))])
    taken = bags_of(batch.sparse_features.samples(start, stop))
    assert taken == [feature[start:stop] for feature in bags_of(batch.sparse_features)]


def test_a_batch_in_one_part_is_not_copied() -> None:
    batch = Batch.empty(NUM_DENSE, 1)
    assert batch.split(1)[0] is batch


def test_an_empty_batch_has_the_features_of_any_other() -> None:
    Batch.empty(NUM_DENSE, 3).check(NUM_DENSE, 3)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch.empty(NUM_DENSE + 1, 1), r"^a batch of 0 labels has dense features of shape \[0, 3\], not"),
        (Batch.empty(NUM_DENSE, 2), r"^a batch has 2 sparse features, not 1$"),
        (Batch.empty(NUM_DENSE, 1)._replace(labels=torch.ones(1)), r"^a batch of 1 labels has .* \[1, 2\]"),
        (
            Batch.empty(NUM_DENSE, 1)._replace(
                sparse_features=SparseFeatures(torch.arange(3), None, None, 1)
            ),
            r"^a batch of 0 labels .* and sparse features of 3 samples$",
        ),
    ],
)
def test_a_batch_that_does_not_fit_says_how(batch: Batch, message: str) -> None:
    with pytest.raises(DataError, match=message):
        batch.check(NUM_DENSE, 1)

"""Pooling by a scatter equals ``embedding_bag``, and sequences are padded with zeros."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

from hybrid.embedding.table_spec import Pooling
from hybrid.inference.pooling import pad_sequences, pool_bags


@pytest.mark.parametrize("pooling", list(Pooling))
@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 4), max_size=12))
def test_pooling_equals_embedding_bag(pooling: Pooling, lengths: list[int]) -> None:
    rows_LD = torch.randn(sum(lengths), 3, generator=torch.Generator().manual_seed(len(lengths)))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    expected = torch.zeros(len(lengths), 3)
    if len(rows_LD):
        positions = torch.arange(len(rows_LD))
        expected = F.embedding_bag(positions, rows_LD, offsets, mode=pooling.value, include_last_offset=True)
    assert torch.equal(pool_bags(rows_LD, offsets, pooling), expected)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 4), max_size=12), most=st.integers(1, 5))
def test_sequences_are_padded_and_have_their_length(lengths: list[int], most: int) -> None:
    rows_LD = torch.randn(sum(lengths), 3, generator=torch.Generator().manual_seed(len(lengths)))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    found = pad_sequences(rows_LD, offsets, most)
    assert found.shape == (len(lengths), 3 * most + 1)
    for row, bag in zip(found, rows_LD.split(lengths), strict=True):
        kept = bag[:most].flatten()
        expected = torch.cat([F.pad(kept, (0, 3 * most - len(kept))), torch.tensor([float(len(bag[:most]))])])
        assert torch.equal(row, expected)

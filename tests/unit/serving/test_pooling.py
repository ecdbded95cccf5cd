"""Pooling by a scatter is torch's own ``embedding_bag``."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

from hybrid.embedding.spec import Pooling
from hybrid.serving.pooling import pooled


@pytest.mark.parametrize("pooling", list(Pooling))
@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 4), max_size=12))
def test_it_is_embedding_bag(pooling: Pooling, lengths: list[int]) -> None:
    rows_LD = torch.randn(sum(lengths), 3, generator=torch.Generator().manual_seed(len(lengths)))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    expected = torch.zeros(len(lengths), 3)
    if len(rows_LD):
        positions = torch.arange(len(rows_LD))
        expected = F.embedding_bag(positions, rows_LD, offsets, mode=pooling.value, include_last_offset=True)
    assert torch.equal(pooled(rows_LD, offsets, pooling), expected)

"""Pooling against plain tensor arithmetic."""

import itertools

import pytest
import torch
from torch import Tensor

from hybrid.embedding.bags import Bags, concatenate, pool_and_record
from hybrid.embedding.table_spec import Pooling

ROWS, DIM = 13, 3

# Bags with none, one, several and repeated ids; the first and the last are empty.
BAGS = [[], [3, 3, 12], [0], [], [5, 3, 1, 0], [12, 12], []]


def bags_of(lists: list[list[int]], pooling: Pooling = Pooling.SUM, weighted: bool = False) -> Bags:
    ids_L = torch.tensor([i for bag in lists for i in bag], dtype=torch.int64)
    offsets = torch.tensor([0] + [len(bag) for bag in lists]).cumsum(0)
    weights_L = torch.linspace(-1, 2, len(ids_L)) if weighted else None
    return Bags(ids_L, offsets, weights_L, pooling)


every_kind = pytest.mark.parametrize(
    "bags",
    [
        *(pytest.param(bags_of(BAGS, pooling), id=pooling) for pooling in Pooling),
        pytest.param(bags_of(BAGS, Pooling.SUM, weighted=True), id="weighted"),
        pytest.param(Bags(torch.tensor([4, 0, 4, 12, 0])), id="one id each"),
        *(pytest.param(bags_of([[], [], []], pooling), id=f"empty bags, {pooling}") for pooling in Pooling),
        *(pytest.param(bags_of([], pooling), id=f"no bags, {pooling}") for pooling in Pooling),
        pytest.param(Bags(torch.empty(0, dtype=torch.int64)), id="no ids"),
    ],
)


def some_rows(dtype: torch.dtype = torch.float64) -> Tensor:
    """``weight_RD``, of which the rows 3 and 5, of one bag, are equal and the largest."""
    weight_RD = torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight_RD[[3, 5]] = 4.0
    return weight_RD.to(dtype)


def plain_pool(weight_RD: Tensor, bags: Bags) -> Tensor:
    """Pooling bag by bag with plain tensor arithmetic."""
    offsets = bags.offsets.tolist() if bags.offsets is not None else list(range(len(bags.ids_L) + 1))
    pooled = []
    for start, stop in itertools.pairwise(offsets):
        rows_LD = weight_RD[bags.ids_L[start:stop]]
        if bags.weights_L is not None:
            rows_LD = rows_LD * bags.weights_L[start:stop, None].to(rows_LD.dtype)
        if start == stop:
            pooled.append(weight_RD.new_zeros(weight_RD.shape[1]))
        elif bags.pooling is Pooling.SUM:
            pooled.append(rows_LD.sum(0))
        elif bags.pooling is Pooling.MEAN:
            pooled.append(rows_LD.mean(0))
        else:
            # As EmbeddingBag does, the first of equal rows takes the whole gradient.
            pooled.append(rows_LD.gather(0, rows_LD.argmax(0, keepdim=True))[0])
    return torch.stack(pooled) if pooled else weight_RD.new_zeros(0, weight_RD.shape[1])


@every_kind
def test_pooling_equals_plain_arithmetic(bags: Bags) -> None:
    weight_RD = some_rows()
    pooled_BD, _ = pool_and_record(weight_RD, bags)
    torch.testing.assert_close(pooled_BD, plain_pool(weight_RD, bags), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    "parts",
    [
        *(
            [
                bags_of(bags, weighted=is_weighted)
                for bags, is_weighted in ((BAGS, first), (BAGS[4:6], second), (BAGS[1:3], first))
            ]
            for first in (False, True)
            for second in (False, True)
        ),
        [Bags(torch.tensor([1, 2])), Bags(torch.tensor([4]))],
    ],
    ids=["unweighted", "second weighted", "first weighted", "weighted", "single ids"],
)
def test_concatenated_bags_pool_as_their_parts(parts: list[Bags]) -> None:
    weight_RD = some_rows()
    expected_BD = torch.cat([pool_and_record(weight_RD, part)[0] for part in parts])
    pooled_BD, _ = pool_and_record(weight_RD, concatenate(parts))
    torch.testing.assert_close(pooled_BD, expected_BD, rtol=1e-14, atol=1e-14)

"""Concatenated bags, of which some have weights."""

import pytest
import torch

from hybrid.embedding.bags import Bags, concatenate, pool_and_record

ROWS, DIM = 13, 3

# Bags with none, one, several and repeated ids; the first and the last are empty.
BAGS = [[], [3, 3, 12], [0], [], [5, 3, 1, 0], [12, 12], []]


def bags_of(lists: list[list[int]], weighted: bool) -> Bags:
    ids_L = torch.tensor([i for bag in lists for i in bag], dtype=torch.int64)
    offsets = torch.tensor([0] + [len(bag) for bag in lists]).cumsum(0)
    weights_L = torch.linspace(-1, 2, len(ids_L)) if weighted else None
    return Bags(ids_L, offsets, weights_L)


@pytest.mark.parametrize(
    "parts",
    [
        *(
            [
                bags_of(bags, is_weighted)
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
    weight_RD = torch.randn(ROWS, DIM, dtype=torch.float64)
    expected_BD = torch.cat([pool_and_record(weight_RD, part)[0] for part in parts])
    pooled_BD, _ = pool_and_record(weight_RD, concatenate(parts))
    torch.testing.assert_close(pooled_BD, expected_BD, rtol=1e-14, atol=1e-14)

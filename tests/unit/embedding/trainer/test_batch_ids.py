"""What a batch says of its ids is checked before anything trusts it."""

import pytest
import torch
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.errors import DataError


@pytest.mark.parametrize(
    "offsets",
    [[0, 5, 2, 3], [0, 1, 2, 10**6], [0, 3_000_000, 2, 3], [1, 2, 3, 3], [0, 1, 1, 2], [0, -1, 2, 3]],
    ids=str,
)
def test_offsets_that_are_not_those_of_the_ids_are_refused(offsets: list[int]) -> None:
    """Compiled loops would read and write what lies beyond."""
    sparse = SparseFeatures(torch.tensor([1, 2, 3]), torch.tensor(offsets), None, 1)
    with pytest.raises(
        DataError, match=r"^the offsets of a batch must rise from 0 to 3, the number of its ids$"
    ):
        BatchIds(sparse)


@pytest.mark.parametrize(
    ("offsets", "weights_L", "message"),
    [
        (torch.tensor([0, 1, 3]), torch.ones(2), "a batch has 2 weights for 3 ids"),
        (torch.arange(4), None, "a batch of 2 sparse features has 3 bags of ids"),
        (None, None, "a batch of 2 sparse features has 3 bags of ids"),
    ],
)
def test_bags_and_weights_are_those_of_the_ids(
    offsets: Tensor | None, weights_L: Tensor | None, message: str
) -> None:
    with pytest.raises(DataError, match=f"^{message}$"):
        BatchIds(SparseFeatures(torch.tensor([1, 2, 3]), offsets, weights_L, 2))

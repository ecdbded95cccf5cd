"""Gradients of rows against autograd."""

import pytest
import torch
from support.bags import BAGS, DIM, ROWS, bags_of, every_kind, plain_pool, some_rows
from torch import Tensor

from hybrid.embedding import kernels
from hybrid.embedding.bags import Bags, pool_and_record
from hybrid.embedding.row_gradients import RowGradients
from hybrid.embedding.table_spec import Pooling


def some_gradients(bags: Bags, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(bags.num_bags, DIM, dtype=torch.float64, generator=generator).to(dtype)


def row_gradients(bags: Bags, grad_BD: Tensor) -> RowGradients:
    return RowGradients(bags, grad_BD, kernels.group_ids(bags.ids_L.numpy(), ROWS))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@every_kind
def test_they_equal_autograd(bags: Bags, dtype: torch.dtype, tolerance: float) -> None:
    weight_RD, grad_BD = some_rows(dtype).requires_grad_(), some_gradients(bags, dtype)
    _, recorded = pool_and_record(weight_RD.detach(), bags)
    gradients = row_gradients(recorded, grad_BD)
    assert gradients.rows_U.tolist() == sorted(set(bags.ids_L.tolist()))
    dense_RD = torch.zeros(ROWS, DIM, dtype=dtype).index_copy(0, gradients.rows_U, gradients.whole())
    loss = (plain_pool(weight_RD, bags) * grad_BD).sum() + 0 * weight_RD.sum()
    (expected_RD,) = torch.autograd.grad(loss, weight_RD)
    torch.testing.assert_close(dense_RD, expected_RD, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_they_are_those_of_the_time_of_the_lookup(pooling: Pooling) -> None:
    """Rows that change meanwhile, as in pipelined steps, change no gradient."""
    weight_RD = some_rows()
    _, bags = pool_and_record(weight_RD, bags_of(BAGS, pooling))
    grad_BD = some_gradients(bags)
    expected_UD = row_gradients(bags, grad_BD).whole()
    weight_RD.neg_()
    assert torch.equal(row_gradients(bags, grad_BD).whole(), expected_UD)

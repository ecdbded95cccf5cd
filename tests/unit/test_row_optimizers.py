"""Row optimizers against torch.optim, where torch has them, and against their formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from hybrid.config import TABLE_OPTIMIZERS
from hybrid.embedding.optimizer import OPTIMIZERS, RowOptimizer
from hybrid.embedding.placement import state_values_per_row
from hybrid.embedding.spec import OptimizerSpec, Pooling, TableSpec

pytestmark = pytest.mark.usefixtures("sparse_checks")

ROWS, DIM, STEPS = 9, 4, 20
RATE, EPS, BETAS = 0.3, 1e-3, (0.8, 0.95)


@pytest.fixture
def sparse_checks() -> Iterator[None]:
    """torch warns where sparse tensors are made and this is not decided."""
    with torch.sparse.check_sparse_tensor_invariants(True):
        yield


def make(name: str, weight_RD: Tensor, eps: float = EPS) -> RowOptimizer:
    return OPTIMIZERS[name](OptimizerSpec(name, RATE, eps, BETAS), weight_RD)


def initial(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)


def steps(every_row: bool = False, dtype: torch.dtype = torch.float64) -> Iterator[tuple[Tensor, Tensor]]:
    """Touched rows and their gradients; the last row is touched only if every row is."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        rows_U = torch.randperm(ROWS - 1, generator=generator)[: 1 + step % (ROWS - 1)].sort().values
        if every_row:
            rows_U = torch.arange(ROWS)
        yield rows_U, torch.randn(len(rows_U), DIM, dtype=torch.float64, generator=generator).to(dtype)


def assert_equals_torch(
    name: str,
    reference: torch.optim.Optimizer,
    parameter: nn.Parameter,
    sparse: bool,
    every_row: bool = False,
    eps: float = EPS,
) -> None:
    """20 steps of ours on touched rows equal ``reference`` with gradients of zero elsewhere."""
    weight_RD = parameter.detach().clone()
    optimizer = make(name, weight_RD, eps)
    for rows_U, grad_UD in steps(every_row):
        optimizer.step(rows_U, grad_UD)
        gradient = torch.sparse_coo_tensor(rows_U[None], grad_UD, parameter.shape)
        parameter.grad = gradient if sparse else gradient.to_dense()
        reference.step()
    torch.testing.assert_close(weight_RD, parameter.detach(), rtol=1e-12, atol=1e-12)
    assert not torch.equal(weight_RD, initial())


@pytest.mark.parametrize("sparse", [True, False])
def test_sgd_equals_torch(sparse: bool) -> None:
    parameter = nn.Parameter(initial())
    assert_equals_torch("sgd", torch.optim.SGD([parameter], lr=RATE), parameter, sparse)


@pytest.mark.parametrize("sparse", [True, False])
def test_adagrad_equals_torch(sparse: bool) -> None:
    parameter = nn.Parameter(initial())
    assert_equals_torch("adagrad", torch.optim.Adagrad([parameter], lr=RATE, eps=EPS), parameter, sparse)


def test_adam_equals_torch_where_every_step_touches_every_row() -> None:
    parameter = nn.Parameter(initial())
    reference = torch.optim.Adam([parameter], lr=RATE, betas=BETAS, eps=EPS)
    assert_equals_torch("adam", reference, parameter, sparse=False, every_row=True)


def test_adam_equals_sparse_adam_but_for_eps() -> None:
    """SparseAdam adds eps before the bias is corrected, Kingma & Ba and we after it."""
    parameter = nn.Parameter(initial())
    reference = torch.optim.SparseAdam([parameter], lr=RATE, betas=BETAS, eps=1e-300)
    assert_equals_torch("adam", reference, parameter, sparse=True, every_row=True, eps=1e-300)


def test_adam_in_float32_corrects_the_bias_as_exactly_as_torch() -> None:
    """1 - 0.999 ** n in float32 would be off by a part in 20,000 at the first steps."""
    parameter = nn.Parameter(initial(torch.float32))
    weight_RD = parameter.detach().clone()
    optimizer = OPTIMIZERS["adam"](OptimizerSpec("adam", 1.0), weight_RD)
    reference = torch.optim.Adam([parameter], lr=1.0)
    for rows_U, grad_UD in steps(every_row=True, dtype=torch.float32):
        optimizer.step(rows_U, grad_UD)
        parameter.grad = grad_UD
        reference.step()
    torch.testing.assert_close(weight_RD, parameter.detach(), rtol=1e-6, atol=4e-6)


def test_adam_counts_the_steps_of_each_row() -> None:
    weight_RD = initial()
    expected = weight_RD.tolist()
    mean = [[0.0] * DIM for _ in range(ROWS)]
    square = [[0.0] * DIM for _ in range(ROWS)]
    count = [0] * ROWS
    optimizer = make("adam", weight_RD)
    beta1, beta2 = BETAS
    for rows_U, grad_UD in steps():
        optimizer.step(rows_U, grad_UD)
        for row, gradient in zip(rows_U.tolist(), grad_UD.tolist(), strict=True):
            count[row] += 1
            for d, g in enumerate(gradient):
                mean[row][d] = beta1 * mean[row][d] + (1 - beta1) * g
                square[row][d] = beta2 * square[row][d] + (1 - beta2) * g * g
                m = mean[row][d] / (1 - beta1 ** count[row])
                v = square[row][d] / (1 - beta2 ** count[row])
                expected[row][d] -= RATE * m / (math.sqrt(v) + EPS)
    assert len(set(count)) > 2
    torch.testing.assert_close(weight_RD, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert optimizer.state["steps"].tolist() == count


def test_rowwise_adagrad_follows_its_formula() -> None:
    weight_RD = initial()
    expected, total = weight_RD.tolist(), [0.0] * ROWS
    optimizer = make("rowwise_adagrad", weight_RD)
    for rows_U, grad_UD in steps():
        optimizer.step(rows_U, grad_UD)
        for row, gradient in zip(rows_U.tolist(), grad_UD.tolist(), strict=True):
            total[row] += sum(g * g for g in gradient) / DIM
            for d, g in enumerate(gradient):
                expected[row][d] -= RATE * g / (math.sqrt(total[row]) + EPS)
    torch.testing.assert_close(weight_RD, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", TABLE_OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_no_step_touches_keep_every_bit(name: str, dtype: torch.dtype) -> None:
    weight_RD = initial(dtype)
    optimizer = make(name, weight_RD)
    tensors = {"weight": weight_RD, **optimizer.state}
    for rows_U, grad_UD in steps(dtype=dtype):
        before = {key: tensor.clone() for key, tensor in tensors.items()}
        optimizer.step(rows_U, grad_UD)
        untouched = torch.ones(ROWS, dtype=torch.bool)
        untouched[rows_U] = False
        for key, tensor in tensors.items():
            assert torch.equal(tensor[untouched], before[key][untouched])
            assert not torch.equal(tensor, before[key])


@pytest.mark.parametrize("name", TABLE_OPTIMIZERS)
def test_a_step_that_touches_no_row_changes_nothing(name: str) -> None:
    weight_RD = initial()
    optimizer = make(name, weight_RD)
    optimizer.step(torch.empty(0, dtype=torch.int64), torch.empty(0, DIM, dtype=torch.float64))
    assert torch.equal(weight_RD, initial())
    assert all(not tensor.any() for tensor in optimizer.state.values())


@pytest.mark.parametrize("name", TABLE_OPTIMIZERS)
def test_the_planned_size_of_the_state_is_its_real_size(name: str) -> None:
    spec = OptimizerSpec(name, RATE)
    table = TableSpec("t", ROWS, DIM, Pooling.SUM, ("t",), spec, 1.0)
    state = make(name, initial(torch.float32)).state
    assert all(len(tensor) == ROWS for tensor in state.values())
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    assert sum(tensor.numel() for tensor in state.values()) == ROWS * state_values_per_row(table)


def test_every_optimizer_of_the_configuration_exists() -> None:
    assert set(OPTIMIZERS) == set(TABLE_OPTIMIZERS)

"""Row optimizers against those of the reference (see unit/reference/test_reference_training.py)."""

import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from hybrid.config.table_sections import TABLE_OPTIMIZERS
from hybrid.embedding import kernels
from hybrid.embedding.bags import Bags
from hybrid.embedding.row_gradients import GroupedBags, RowGradients
from hybrid.embedding.table_spec import OptimizerSpec
from hybrid.embedding.worker.row_optimizers import OPTIMIZERS, Adam, RowOptimizer
from hybrid.reference.reference_rows import initial_state, update_rows

ROWS, DIM, STEPS = 9, 5, 15  # a width that no vector register holds evenly
RATE, EPS, BETAS = 0.3, 1e-3, (0.8, 0.95)

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
OPTIMIZERS_OF_ALL_ROWS = [
    name for name in TABLE_OPTIMIZERS.names if "all_rows" in TABLE_OPTIMIZERS.parse("", name).arguments
]
every_optimizer = pytest.mark.parametrize("name", TABLE_OPTIMIZERS.names)


def make(name: str, weight_RD: Tensor, **settings: Any) -> RowOptimizer:
    fields: dict[str, Any] = {"eps": EPS, "betas": BETAS, "momentum": 0.7, "ftrl_beta": 0.5, "ftrl_l1": 0.3}
    return OPTIMIZERS[name](OptimizerSpec(name, RATE, **{**fields, **settings}), weight_RD)


def initial(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)


def steps(dtype: torch.dtype = torch.float64, seed: int = 1) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield touched rows (none at first, never the last row), their gradients, and the factor."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        rows_U = torch.randperm(ROWS - 1, generator=generator)[: step % ROWS].sort().values
        grad_UD = torch.randn(len(rows_U), DIM, dtype=torch.float64, generator=generator).to(dtype)
        yield rows_U, grad_UD, {5: 0.0, 6: 1e-40}.get(step, 1 / (1 + step % 7))


@every_optimizer
@pytest.mark.parametrize("decay", [0.0, 0.01])
@dtypes
def test_step_equals_the_reference(name: str, decay: float, dtype: torch.dtype) -> None:
    """Bits are equal, except for ftrl, which the reference computes by other formulas."""
    weight_RD, expected_RD = initial(dtype), initial(dtype)
    optimizer = make(name, weight_RD, weight_decay=decay)
    state = initial_state(optimizer.spec, expected_RD)
    close = {torch.float32: 2e-5, torch.float64: 1e-12}[dtype] if name == "ftrl" else 0.0
    for rows_U, grad_UD, factor in steps(dtype):
        given_UD = grad_UD.clone()
        gradients = RowGradients(
            GroupedBags(Bags(rows_U), kernels.group_ids(rows_U.numpy(), ROWS), dtype), grad_UD
        )
        optimizer.apply(gradients, 0, len(rows_U), 1.0, factor)
        assert torch.equal(grad_UD, given_UD)
        update_rows(optimizer.spec, RATE * factor, expected_RD, state, rows_U, grad_UD)
        torch.testing.assert_close(weight_RD, expected_RD, rtol=close, atol=close)
    assert torch.equal(weight_RD[-1], initial(dtype)[-1])
    for key, tensor in optimizer.state.items():
        torch.testing.assert_close(tensor, state[key], rtol=close, atol=close)


@pytest.mark.parametrize("name", OPTIMIZERS_OF_ALL_ROWS)
@dtypes
@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1), decay=st.sampled_from([0.0, 0.01]), cuts=st.sets(st.integers(1, ROWS - 1))
)
def test_step_all_equals_the_reference_in_any_blocks(
    name: str, dtype: torch.dtype, seed: int, decay: float, cuts: set[int]
) -> None:
    weight_RD, expected_RD = initial(dtype), initial(dtype)
    optimizer = make(name, weight_RD, weight_decay=decay, all_rows=True)
    state = initial_state(optimizer.spec, expected_RD)
    for rows_U, grad_UD, factor in steps(dtype, seed):
        given_UD = grad_UD.clone()
        for first, last in pairwise([0, *sorted(cuts), ROWS]):
            is_here_U = (rows_U >= first) & (rows_U < last)
            optimizer.step_all(first, last, rows_U[is_here_U], grad_UD[is_here_U], factor)
        update_rows(optimizer.spec, RATE * factor, expected_RD, state, rows_U, grad_UD)
        assert torch.equal(grad_UD, given_UD)
        assert torch.equal(weight_RD, expected_RD)
    for key, tensor in optimizer.state.items():
        assert torch.equal(tensor, state[key])
    assert torch.equal(weight_RD[-1], initial(dtype)[-1]) == (not decay)


@pytest.mark.parametrize("name", OPTIMIZERS_OF_ALL_ROWS)
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_steps_all_rows_only_if_that_changes_rows(name: str, decay: float) -> None:
    """Rows of the reference that only the first step touches show it."""
    table_RD = initial()
    optimizer = make(name, initial(), weight_decay=decay, all_rows=True)
    state = initial_state(optimizer.spec, table_RD)
    update_rows(optimizer.spec, RATE, table_RD, state, torch.arange(ROWS), torch.ones_like(table_RD))
    before = table_RD.clone()
    grad_UD = torch.ones(1, DIM, dtype=table_RD.dtype)
    update_rows(optimizer.spec, RATE, table_RD, state, torch.arange(1), grad_UD)
    assert optimizer.spec.steps_all_rows != torch.equal(table_RD[1:], before[1:])
    assert not make(name, initial(), weight_decay=decay).spec.steps_all_rows


def test_bias_corrections_are_exact_and_need_little_memory() -> None:
    """A resumed row may have taken any number of steps."""
    beta1, beta2 = BETAS
    optimizer = make("adam", initial())
    assert isinstance(optimizer, Adam)
    counts = [1, 2, 1500, 10**6, *range(3, 1500)]
    tracemalloc.start()
    optimizer.corrections(torch.tensor([1e6]))
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()
    for count in counts:
        ours = [float(tensor) for tensor in optimizer.corrections(torch.tensor([float(count)]))]
        assert ours == [1 - beta1**count, (1 - beta2**count) ** 0.5]
    together = torch.cat(optimizer.corrections(torch.tensor(counts, dtype=torch.float32)), dim=1)
    assert together.tolist() == [[1 - beta1**count, (1 - beta2**count) ** 0.5] for count in counts]


def test_change_of_the_ftrl_rate_moves_no_row() -> None:
    weight_RD = initial()
    optimizer = make("ftrl", weight_RD, weight_decay=0.01, ftrl_l1=3.0)
    for rows_U, grad_UD, _ in steps():
        optimizer.step(rows_U, grad_UD)
    before = weight_RD.clone()
    for factor in (0.5, 0.001, 2.0):
        optimizer.step(torch.arange(ROWS), torch.full_like(weight_RD, 1e-14), factor)
    torch.testing.assert_close(weight_RD, before, rtol=1e-12, atol=1e-12)
    assert (before == 0).any()


@every_optimizer
def test_zero_gradients_change_no_row(name: str) -> None:
    """Use the smallest eps of the configuration, and some rows of zeros."""
    weight_RD = initial(torch.float32)
    weight_RD[:3] = 0
    before = weight_RD.clone()
    optimizer = make(name, weight_RD, eps=1e-30)
    for factor in (1.0, 0.0, 1.0):
        optimizer.step(torch.arange(ROWS), torch.zeros_like(weight_RD), factor)
    assert torch.equal(weight_RD, before)
    assert all(tensor.isfinite().all() for tensor in optimizer.state.values())

"""Row optimizers of the reference: each row against a separate torch optimizer, or its formula."""

import dataclasses
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from hybrid.embedding.table_spec import OptimizerSpec
from hybrid.reference.reference_rows import State, initial_state, update_rows

ROWS, DIM, STEPS = 9, 5, 25
RATE, EPS, BETAS, MOMENTUM, DECAY = 0.3, 1e-3, (0.8, 0.95), 0.7, 0.02

TORCH: dict[str, Callable[[list[nn.Parameter], float], torch.optim.Optimizer]] = {
    "sgd": lambda p, decay: torch.optim.SGD(p, RATE, weight_decay=decay),
    "momentum": lambda p, decay: torch.optim.SGD(p, RATE, MOMENTUM, weight_decay=decay),
    "adagrad": lambda p, decay: torch.optim.Adagrad(p, RATE, weight_decay=decay, eps=EPS),
    "adam": lambda p, decay: torch.optim.Adam(p, RATE, BETAS, EPS, decay),
    "adamw": lambda p, decay: torch.optim.AdamW(p, RATE, BETAS, EPS, decay),
}
STATE_NAMES = {
    "momentum": {"buffer": "momentum_buffer"},
    "adagrad": {"sum": "sum"},
    "adam": {"mean": "exp_avg", "square": "exp_avg_sq", "steps": "step"},
    "adamw": {"mean": "exp_avg", "square": "exp_avg_sq", "steps": "step"},
}


def make_spec(name: str, decay: float = 0.0, ftrl_beta: float = 0.5, ftrl_l1: float = 0.0) -> OptimizerSpec:
    return OptimizerSpec(
        name, RATE, EPS, BETAS, momentum=MOMENTUM, weight_decay=decay, ftrl_beta=ftrl_beta, ftrl_l1=ftrl_l1
    )


def initial(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)


def steps(dtype: torch.dtype = torch.float64) -> Iterator[tuple[Tensor, Tensor]]:
    """Touched rows and their gradients; the last row is never touched, the first one only once."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        ids_U = 1 + torch.randperm(ROWS - 2, generator=generator)[: 1 + step % 5].sort().values
        if step == 3:
            ids_U = torch.tensor([0])
        yield ids_U, torch.randn(len(ids_U), DIM, generator=generator, dtype=torch.float64).to(dtype)


def begin(spec: OptimizerSpec, dtype: torch.dtype = torch.float64) -> tuple[Tensor, State]:
    table_RD = initial(dtype)
    return table_RD, initial_state(spec, table_RD)


def train(spec: OptimizerSpec, dtype: torch.dtype = torch.float64) -> tuple[Tensor, State]:
    table_RD, state = begin(spec, dtype)
    for ids_U, grad_UD in steps(dtype):
        update_rows(spec, RATE, table_RD, state, ids_U, grad_UD)
    return table_RD, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("decay", [0.0, DECAY])
@pytest.mark.parametrize("name", TORCH)
def test_each_row_has_the_bits_of_a_separate_torch_optimizer(
    name: str, decay: float, dtype: torch.dtype
) -> None:
    table_RD, state = train(make_spec(name, decay), dtype)
    rows = [nn.Parameter(row) for row in initial(dtype)]
    optimizers = [TORCH[name]([row], decay) for row in rows]
    for ids_U, grad_UD in steps(dtype):
        for row, gradient in zip(ids_U.tolist(), grad_UD, strict=True):
            rows[row].grad = gradient
            optimizers[row].step()
    for row, (parameter, optimizer) in enumerate(zip(rows, optimizers, strict=True)):
        assert torch.equal(table_RD[row], parameter.detach()), row
        for ours, theirs in STATE_NAMES.get(name, {}).items():
            expected = optimizer.state[parameter].get(theirs, 0.0) if optimizer.state else 0.0
            assert torch.equal(state[ours][row], torch.zeros_like(state[ours][row]) + expected), ours
    assert torch.equal(table_RD[-1], initial(dtype)[-1])
    assert not torch.equal(table_RD[:-1], initial(dtype)[:-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("decay", [0.0, DECAY])
@pytest.mark.parametrize("name", TORCH)
def test_whole_table_equals_nn_embedding(name: str, decay: float, dtype: torch.dtype) -> None:
    spec = dataclasses.replace(make_spec(name, decay), all_rows=True)
    table_RD, state = begin(spec, dtype)
    embedding = nn.Embedding.from_pretrained(initial(dtype), freeze=False)
    optimizer = TORCH[name]([embedding.weight], decay)
    for step, (ids_U, grad_UD) in enumerate(steps(dtype)):
        optimizer.param_groups[0]["lr"] = rate = RATE / (1 + step % 3)
        optimizer.zero_grad()
        embedding(ids_U).backward(grad_UD)
        optimizer.step()
        update_rows(spec, rate, table_RD, state, ids_U, grad_UD)
    assert torch.equal(table_RD, embedding.weight.detach())
    for ours, theirs in STATE_NAMES.get(name, {}).items():
        expected = optimizer.state[embedding.weight][theirs]
        assert torch.equal(state[ours], torch.zeros_like(state[ours]) + expected), ours
    assert torch.equal(table_RD[-1], initial(dtype)[-1]) == (not decay)


@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_rowwise_adagrad_follows_its_formula(decay: float) -> None:
    table_RD, state = train(make_spec("rowwise_adagrad", decay))
    expected, total = initial().tolist(), [0.0] * ROWS
    for ids_U, grad_UD in steps():
        for row, values in zip(ids_U.tolist(), grad_UD.tolist(), strict=True):
            gradient = [g + decay * w for g, w in zip(values, expected[row], strict=True)]
            total[row] += sum(g * g for g in gradient) / DIM
            for d, g in enumerate(gradient):
                expected[row][d] -= RATE * g / (math.sqrt(total[row]) + EPS)
    torch.testing.assert_close(table_RD, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state["sum"], torch.tensor(total, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_ftrl_minimizes_its_penalized_objective() -> None:
    """Of gradients g_s at rows w_s: sum(g_s) w + l1 |w| + l2/2 w^2 + sum over s of sigma_s/2 (w - w_s)^2.

    The first sigma is beta/alpha, centered where the penalties' own pull keeps the initial row.
    """
    beta, l1, l2 = 0.5, 1.0, 0.3
    spec = make_spec("ftrl", l2, beta, l1)
    table_RD, state = begin(spec)
    linear_RD = -table_RD * (beta / RATE + l2) - table_RD.sign() * l1
    quadratic_RD = torch.full_like(table_RD, beta / RATE + l2)
    square_RD = torch.zeros_like(table_RD)
    zeros = 0
    for ids_U, grad_UD in steps():
        sigma_UD = ((square_RD[ids_U] + grad_UD**2).sqrt() - square_RD[ids_U].sqrt()) / RATE
        linear_RD[ids_U] += grad_UD - sigma_UD * table_RD[ids_U]
        quadratic_RD[ids_U] += sigma_UD
        square_RD[ids_U] += grad_UD**2
        update_rows(spec, RATE, table_RD, state, ids_U, grad_UD)
        w_UD = table_RD[ids_U]
        slope_UD = linear_RD[ids_U] + quadratic_RD[ids_U] * w_UD
        zeros += int((w_UD == 0).sum())
        assert (slope_UD[w_UD == 0].abs() <= l1).all()
        assert ((slope_UD + l1 * w_UD.sign())[w_UD != 0].abs() < 1e-12).all()
    assert zeros

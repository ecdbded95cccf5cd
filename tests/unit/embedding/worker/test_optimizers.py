"""Row optimizers against torch.optim, where torch has them, and against their formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from hybrid.config.sections import TABLE_OPTIMIZERS
from hybrid.embedding.placement import state_values_per_row
from hybrid.embedding.spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.worker.optimizers import OPTIMIZERS, BiasCorrections, RowOptimizer

ROWS, DIM, STEPS = 9, 5, 25  # a width that no vector register holds evenly
RATE, EPS, BETAS, MU = 0.3, 1e-3, (0.8, 0.95), 0.7
BETA, L1 = 0.5, 0.3
DECAYS = [0.0, 0.01]

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
every_optimizer = pytest.mark.parametrize("name", TABLE_OPTIMIZERS)

Reference: TypeAlias = Callable[..., torch.optim.Optimizer]


def make(name: str, weight_RD: Tensor, **settings: Any) -> RowOptimizer:
    fields: dict[str, Any] = {"eps": EPS, "betas": BETAS, "momentum": MU, "ftrl_beta": BETA, "ftrl_l1": L1}
    rate = settings.pop("rate", RATE)
    return OPTIMIZERS[name](OptimizerSpec(name, rate, **{**fields, **settings}), weight_RD)


def initial(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)


def steps(
    every_row: bool = False, dtype: torch.dtype = torch.float64
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Touched rows, their gradients, and the factor; the last row is touched only if every row is."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        rows_U = torch.randperm(ROWS - 1, generator=generator)[: 1 + step % (ROWS - 1)].sort().values
        if every_row:
            rows_U = torch.arange(ROWS)
        grad_UD = torch.randn(len(rows_U), DIM, dtype=torch.float64, generator=generator).to(dtype)
        yield rows_U, grad_UD, 1 / (1 + step % 7)


IN_TORCH: list[tuple[str, Reference, dict[str, Any]]] = [
    ("sgd", torch.optim.SGD, {}),
    ("momentum", torch.optim.SGD, {"momentum": MU}),
    ("adagrad", torch.optim.Adagrad, {"eps": EPS}),
    ("adam", torch.optim.Adam, {"eps": EPS, "betas": BETAS}),
    ("adamw", torch.optim.AdamW, {"eps": EPS, "betas": BETAS}),
]
in_torch = pytest.mark.parametrize(("name", "cls", "settings"), IN_TORCH, ids=[case[0] for case in IN_TORCH])


def assert_equals_torch(name: str, reference: torch.optim.Optimizer, every_row: bool) -> RowOptimizer:
    """Bit for bit equal to ``reference``, which has gradients of zero where a step touches no row."""
    (group,) = reference.param_groups
    (parameter,) = group["params"]
    weight_RD = parameter.detach().clone()
    rate, settings = group["lr"], {k: group[k] for k in ("eps", "betas", "weight_decay") if k in group}
    optimizer = make(name, weight_RD, rate=rate, **settings)
    for rows_U, grad_UD, factor in steps(every_row, weight_RD.dtype):
        optimizer.step(rows_U, grad_UD, factor)
        parameter.grad = torch.zeros_like(weight_RD).index_copy_(0, rows_U, grad_UD)
        group["lr"] = rate * factor
        reference.step()
        assert torch.equal(weight_RD, parameter.detach())
    assert not torch.equal(weight_RD, initial(weight_RD.dtype))
    return optimizer


@in_torch
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rate", [RATE, 0.01])
@dtypes
def test_it_equals_torch_bit_for_bit_where_every_step_touches_every_row(
    name: str, cls: Reference, settings: dict[str, Any], rate: float, decay: float, dtype: torch.dtype
) -> None:
    parameter = nn.Parameter(initial(dtype))
    reference = cls([parameter], lr=rate, weight_decay=decay, foreach=False, **settings)
    state = assert_equals_torch(name, reference, every_row=True).state
    names = {"mean": "exp_avg", "square": "exp_avg_sq", "sum": "sum", "buffer": "momentum_buffer"}
    for key in state.keys() & names.keys():
        assert torch.equal(state[key], reference.state[parameter][names[key]])


@pytest.mark.parametrize(("name", "cls"), [("sgd", torch.optim.SGD), ("adagrad", torch.optim.Adagrad)])
@dtypes
def test_where_a_zero_gradient_moves_nothing_it_equals_torch_for_any_rows(
    name: str, cls: Reference, dtype: torch.dtype
) -> None:
    assert_equals_torch(name, cls([nn.Parameter(initial(dtype))], lr=RATE, foreach=False), every_row=False)


@pytest.mark.parametrize("dim", [1, 3, 16, 17, 64])
@dtypes
def test_sgd_in_place_has_the_bits_of_torchs_sum_on_the_touched_rows(dim: int, dtype: torch.dtype) -> None:
    """Rows and gradients of any width, at rates whose products round."""
    generator = torch.Generator().manual_seed(dim)
    weight_RD = torch.randn(50, dim, dtype=dtype, generator=generator)
    for rows_dtype, factor in itertools.product((torch.int32, torch.int64), (1.0, 0.1, 1e-3)):
        rows_U = torch.randperm(50, generator=generator)[:33].sort().values
        grad_UD = torch.randn(33, dim, dtype=dtype, generator=generator)
        expected_RD = weight_RD.clone()
        expected_RD[rows_U] = weight_RD[rows_U].add_(grad_UD, alpha=-RATE * factor)
        make("sgd", weight_RD).step(rows_U.to(rows_dtype), grad_UD, factor)
        assert torch.equal(weight_RD, expected_RD)


@dtypes
def test_the_bias_of_adam_is_corrected_as_in_torch_after_many_steps(dtype: torch.dtype) -> None:
    """Beyond the first piece of the table of corrections, and where 0.5 ** n no longer counts."""
    parameter = nn.Parameter(initial(dtype)[:1])
    weight_RD = parameter.detach().clone()
    optimizer = make("adam", weight_RD, betas=(0.5, 0.9999))
    reference = torch.optim.Adam([parameter], lr=RATE, betas=(0.5, 0.9999), eps=EPS, foreach=False)
    parameter.grad = torch.ones_like(parameter)
    for step in range(2200):
        parameter.grad[0, 0] = step % 3 - 1
        optimizer.step(torch.tensor([0]), parameter.grad)
        reference.step()
    assert torch.equal(weight_RD, parameter.detach())


def test_bias_corrections_are_exact_and_their_table_has_an_end() -> None:
    """A row resumed after a million steps needs no table of a million entries."""
    beta1, beta2 = BETAS
    corrections = BiasCorrections(BETAS)
    counts = [1, 2, 1500, 10**6, *range(3, 1500)]
    for count in counts:
        ours = [float(tensor) for tensor in corrections.of(torch.tensor([float(count)]))]
        assert ours == [1 - beta1**count, (1 - beta2**count) ** 0.5]
    together = torch.cat(corrections.of(torch.tensor(counts, dtype=torch.float32)), dim=1)
    assert together.tolist() == [[1 - beta1**count, (1 - beta2**count) ** 0.5] for count in counts]
    assert len(corrections.table_N2) < 2000


def follow(
    optimizer: RowOptimizer, formula: Callable[[int, int, float, float, float], float], dtype: torch.dtype
) -> None:
    """Steps ``optimizer``; its weights equal those of ``formula(row, d, w, g, rate)``, in float64."""
    expected = optimizer.weight_RD.tolist()
    for rows_U, grad_UD, factor in steps(dtype=dtype):
        optimizer.step(rows_U, grad_UD, factor)
        for row, gradient in zip(rows_U.tolist(), grad_UD.tolist(), strict=True):
            for d, g in enumerate(gradient):
                expected[row][d] = formula(row, d, expected[row][d], g, RATE * factor)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5}[dtype]
    actual = optimizer.weight_RD.double()
    torch.testing.assert_close(
        actual, torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance
    )


def zeros() -> list[list[float]]:
    return [[0.0] * DIM for _ in range(ROWS)]


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("decay", DECAYS)
@dtypes
def test_adam_counts_the_steps_of_each_row(name: str, decay: float, dtype: torch.dtype) -> None:
    mean, square, count = zeros(), zeros(), zeros()
    beta1, beta2 = BETAS

    def formula(row: int, d: int, w: float, g: float, rate: float) -> float:
        count[row][d] += 1
        if name == "adam":
            g += decay * w
        else:
            w -= rate * decay * w
        mean[row][d] = beta1 * mean[row][d] + (1 - beta1) * g
        square[row][d] = beta2 * square[row][d] + (1 - beta2) * g * g
        m = mean[row][d] / (1 - math.pow(beta1, count[row][d]))
        v = square[row][d] / (1 - math.pow(beta2, count[row][d]))
        return w - rate * m / (math.sqrt(v) + EPS)

    optimizer = make(name, initial(dtype), weight_decay=decay)
    follow(optimizer, formula, dtype)
    counts = [values[0] for values in count]
    assert optimizer.state["steps"].tolist() == counts
    assert len(set(counts)) > 2


@pytest.mark.parametrize("decay", DECAYS)
@dtypes
def test_the_buffer_of_momentum_rests_with_its_row(decay: float, dtype: torch.dtype) -> None:
    buffer = zeros()

    def formula(row: int, d: int, w: float, g: float, rate: float) -> float:
        buffer[row][d] = MU * buffer[row][d] + g + decay * w
        return w - rate * buffer[row][d]

    follow(make("momentum", initial(dtype), weight_decay=decay), formula, dtype)


@pytest.mark.parametrize("decay", DECAYS)
@dtypes
def test_rowwise_adagrad_follows_its_formula(decay: float, dtype: torch.dtype) -> None:
    weight_RD, sums = initial(dtype), [0.0] * ROWS
    optimizer = make("rowwise_adagrad", weight_RD, weight_decay=decay)
    expected = weight_RD.tolist()
    for rows_U, grad_UD, factor in steps(dtype=dtype):
        optimizer.step(rows_U, grad_UD, factor)
        for row, gradient in zip(rows_U.tolist(), grad_UD.tolist(), strict=True):
            decayed = [g + decay * w for g, w in zip(gradient, expected[row], strict=True)]
            sums[row] += sum(g * g for g in decayed) / DIM
            scale = RATE * factor / (math.sqrt(sums[row]) + EPS)
            expected[row] = [w - scale * g for g, w in zip(decayed, expected[row], strict=True)]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
    reference = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(weight_RD.double(), reference, rtol=tolerance, atol=tolerance)


class TestFTRL:
    @pytest.mark.parametrize("l1", [0.0, L1])
    @pytest.mark.parametrize("decay", DECAYS)
    @pytest.mark.parametrize("start", ["zero", "random"])
    @dtypes
    def test_at_a_constant_rate_it_is_the_algorithm_of_the_paper(
        self, l1: float, decay: float, start: str, dtype: torch.dtype
    ) -> None:
        """Line by line, with the z of a first step such that the row is its own solution."""
        z, n = zeros(), zeros()
        weight_RD = initial(dtype) if start == "random" else torch.zeros(ROWS, DIM, dtype=dtype)
        optimizer = make("ftrl", weight_RD, ftrl_l1=l1, weight_decay=decay)
        expected = weight_RD.tolist()
        for rows_U, grad_UD, _ in steps(dtype=dtype):
            optimizer.step(rows_U, grad_UD)
            for row, gradient in zip(rows_U.tolist(), grad_UD.tolist(), strict=True):
                for d, g in enumerate(gradient):
                    w = expected[row][d]
                    if n[row][d] == 0:
                        z[row][d] = -w * (BETA / RATE + decay) - sign(w) * l1
                    sigma = (math.sqrt(n[row][d] + g * g) - math.sqrt(n[row][d])) / RATE
                    z[row][d] += g - sigma * w
                    n[row][d] += g * g
                    if abs(z[row][d]) <= l1:
                        expected[row][d] = 0.0
                    else:
                        scale = (BETA + math.sqrt(n[row][d])) / RATE + decay
                        expected[row][d] = -(z[row][d] - sign(z[row][d]) * l1) / scale
        tolerance = {torch.float64: 1e-12, torch.float32: 2e-5}[dtype]
        for ours, theirs in ((weight_RD, expected), (optimizer.state["z"], z), (optimizer.state["n"], n)):
            reference = torch.tensor(theirs, dtype=torch.float64)
            torch.testing.assert_close(ours.double(), reference, rtol=tolerance, atol=tolerance)
        touched = weight_RD[:-1]
        assert ((touched == 0).any() and not (touched == 0).all()) == (l1 > 0)

    def test_with_a_schedule_it_moves_by_the_gradient_alone(self) -> None:
        """Without penalties it is adagrad with beta beside the root, at the rate of each step."""
        n = zeros()

        def formula(row: int, d: int, w: float, g: float, rate: float) -> float:
            n[row][d] += g * g
            return w - rate * g / (BETA + math.sqrt(n[row][d]))

        follow(make("ftrl", initial(), ftrl_l1=0.0), formula, torch.float64)

    def test_a_change_of_the_rate_moves_nothing_by_itself(self) -> None:
        weight_RD = initial()
        optimizer = make("ftrl", weight_RD, weight_decay=0.01, ftrl_l1=3.0)
        rows_R, tiny_RD = torch.arange(ROWS), torch.full((ROWS, DIM), 1e-14, dtype=torch.float64)
        for _, grad_UD, _ in steps(every_row=True):
            optimizer.step(rows_R, grad_UD)
        before = weight_RD.clone()
        for factor in (0.5, 0.001, 2.0):
            optimizer.step(rows_R, tiny_RD, factor)
        torch.testing.assert_close(weight_RD, before, rtol=1e-12, atol=1e-12)
        assert (before == 0).any()

    @pytest.mark.parametrize("factor", [0.0, 1e-40])
    def test_without_a_rate_rows_and_state_stay(self, factor: float) -> None:
        weight_RD = initial(torch.float32)
        optimizer = make("ftrl", weight_RD)
        optimizer.step(torch.arange(ROWS), torch.ones(ROWS, DIM), factor)
        assert torch.equal(weight_RD, initial(torch.float32))
        assert all(not tensor.any() for tensor in optimizer.state.values())

    @dtypes
    def test_a_zero_gradient_keeps_every_bit_of_its_value(self, dtype: torch.dtype) -> None:
        weight_RD = initial(dtype)
        optimizer = make("ftrl", weight_RD)
        for rows_U, grad_UD, factor in steps(every_row=True, dtype=dtype):
            before = weight_RD.clone()
            grad_UD[:, ::2] = 0
            optimizer.step(rows_U, grad_UD, factor)
            assert torch.equal(weight_RD[:, ::2], before[:, ::2])
            assert not torch.equal(weight_RD, before)


def sign(x: float) -> float:
    return math.copysign(1.0, x) if x else 0.0


@every_optimizer
@pytest.mark.parametrize("decay", DECAYS)
@dtypes
def test_rows_that_no_step_touches_keep_every_bit(name: str, decay: float, dtype: torch.dtype) -> None:
    weight_RD = initial(dtype)
    optimizer = make(name, weight_RD, weight_decay=decay)
    tensors = {"weight": weight_RD, **optimizer.state}
    for rows_U, grad_UD, factor in steps(dtype=dtype):
        before = {key: tensor.clone() for key, tensor in tensors.items()}
        given_UD = grad_UD.clone()
        optimizer.step(rows_U, grad_UD, factor)
        assert torch.equal(grad_UD, given_UD)
        untouched = torch.ones(ROWS, dtype=torch.bool)
        untouched[rows_U] = False
        for key, tensor in tensors.items():
            assert torch.equal(tensor[untouched], before[key][untouched])
            assert not torch.equal(tensor, before[key])


@every_optimizer
@dtypes
def test_a_row_does_not_depend_on_the_rows_touched_with_it(name: str, dtype: torch.dtype) -> None:
    """So that it makes no difference on which worker a row lies, and beside which others."""
    together, alone = initial(dtype), initial(dtype)
    optimizer = make(name, together, weight_decay=0.01)
    single = make(name, alone, weight_decay=0.01)
    for rows_U, grad_UD, factor in steps(dtype=dtype):
        optimizer.step(rows_U, grad_UD, factor)
        for i in range(len(rows_U)):
            single.step(rows_U[i : i + 1], grad_UD[i : i + 1], factor)
    assert torch.equal(together, alone)
    for key, tensor in optimizer.state.items():
        assert torch.equal(tensor, single.state[key])


@every_optimizer
def test_a_step_that_touches_no_row_changes_nothing(name: str) -> None:
    weight_RD = initial()
    optimizer = make(name, weight_RD, weight_decay=0.01)
    optimizer.step(torch.empty(0, dtype=torch.int64), torch.empty(0, DIM, dtype=torch.float64))
    assert torch.equal(weight_RD, initial())
    assert all(not tensor.any() for tensor in optimizer.state.values())


@every_optimizer
@pytest.mark.parametrize("eps", [1e-30, EPS])
@pytest.mark.parametrize("factor", [0.0, 1.0])
@dtypes
def test_zero_gradients_move_nothing_and_stay_finite(
    name: str, eps: float, factor: float, dtype: torch.dtype
) -> None:
    """With the smallest eps that the configuration takes, and with rows of zeros among the others."""
    weight_RD = initial(dtype)
    weight_RD[:3] = 0
    before = weight_RD.clone()
    optimizer = make(name, weight_RD, eps=eps)
    for _ in range(3):
        optimizer.step(torch.arange(ROWS), torch.zeros_like(weight_RD), factor)
    assert torch.equal(weight_RD, before)
    assert all(tensor.isfinite().all() for tensor in optimizer.state.values())


@every_optimizer
def test_the_planned_size_of_the_state_is_its_real_size(name: str) -> None:
    spec = OptimizerSpec(name, RATE)
    table = TableSpec("t", ROWS, DIM, Pooling.SUM, ("t",), spec, 1.0)
    state = make(name, initial(torch.float32)).state
    assert all(len(tensor) == ROWS for tensor in state.values())
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    assert sum(tensor.numel() for tensor in state.values()) == ROWS * state_values_per_row(table)


def test_every_optimizer_of_the_configuration_exists() -> None:
    assert set(OPTIMIZERS) == set(TABLE_OPTIMIZERS)

"""The reference in one process against models and row optimizers in a few lines of plain torch."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.batch import Batch, SparseFeatures
from hybrid.config import ClusterSection, DenseSection, RunConfig, TrainSection
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.models.dense_net import DenseNet
from hybrid.reference.reference_rows import State, initial_state, update_rows
from hybrid.reference.reference_training import Reference

USERS, ITEMS, DIM, STEPS = 7, 5, 4, 20
INPUT_SPEC = InputSpec(
    ("price", "age"),
    (FeatureSpec("user", USERS), FeatureSpec("item", ITEMS), FeatureSpec("bought", ITEMS, multi_hot=True)),
)
SGD = OptimizerSpec("sgd", 0.3)
PLAIN_SGD = DenseSection(optimizer="SGD", learning_rate=0.1)


class Samples(NamedTuple):
    """Samples of a plain model; ``bought`` has bags: the items of all bags, and their offsets."""

    dense_BF: Tensor
    user_B: Tensor
    item_B: Tensor
    bought_L: Tensor
    bought_offsets: Tensor
    weights_L: Tensor | None
    labels_B: Tensor

    def batch(self) -> Batch:
        size = len(self.labels_B)
        ids_L = torch.cat([self.user_B, self.item_B, self.bought_L])
        offsets = torch.cat([torch.arange(2 * size), 2 * size + self.bought_offsets])
        weights_L = None
        if self.weights_L is not None:
            weights_L = torch.cat([torch.ones(2 * size), self.weights_L])
        sparse = SparseFeatures(ids_L, offsets, weights_L, 3)
        return Batch(self.dense_BF, sparse, self.labels_B, size)


def samples(
    every_row: bool = True, weighted: bool = False, dtype: torch.dtype = torch.float32
) -> Iterator[Samples]:
    """Samples of 20 steps; every second bag of ``bought`` is empty."""
    size, generator = 16, torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        lengths_B = torch.arange(size) % 2 * torch.randint(1, 5, (size,), generator=generator)
        count = int(lengths_B.sum())
        user_B, item_B = torch.arange(size) % USERS, torch.arange(size) % ITEMS
        if not every_row:
            user_B, item_B = user_B // 2, item_B // 2
        order_B = torch.randperm(size, generator=generator)
        yield Samples(
            torch.randn(size, 2, generator=generator, dtype=dtype),
            user_B[order_B],
            item_B[order_B.flip(0)],
            torch.randint(0, ITEMS if every_row else ITEMS // 2, (count,), generator=generator),
            torch.cat([torch.zeros(1, dtype=torch.int64), lengths_B.cumsum(0)]),
            torch.rand(count, generator=generator) if weighted else None,
            torch.randint(0, 2, (size,), generator=generator).to(dtype),
        )


class Interaction(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cross = nn.Linear(width, width)

    def forward(self, bottom_BH: Tensor, pooled_BE: Tensor) -> Tensor:
        x_BH = torch.cat([bottom_BH, pooled_BE], dim=1)
        return torch.tanh(self.cross(x_BH))


def make_net() -> DenseNet:
    torch.manual_seed(5)
    width = 3 + 3 * DIM
    head = nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, 1), nn.Flatten(0))
    return DenseNet(nn.Linear(2, 3), Interaction(width), head)


def make_remote_net() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(3 + 3 * DIM, 3 + 3 * DIM), nn.Tanh())


def initial_rows() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        "users": torch.randn(USERS, DIM, generator=generator),
        "items": torch.randn(ITEMS, DIM, generator=generator),
    }


class Plain(nn.Module):
    """Tables with dense gradients and the net; two features share the table of items."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        mode: str = "sum",
        remote_net: nn.Module | None = None,
        autocast: bool = False,
    ) -> None:
        super().__init__()
        rows = initial_rows()
        self.users = nn.Embedding.from_pretrained(rows["users"], freeze=False)
        self.items = nn.Embedding.from_pretrained(rows["items"], freeze=False)
        self.bought = nn.EmbeddingBag.from_pretrained(
            rows["items"], freeze=False, mode=mode, include_last_offset=True
        )
        self.bought.weight = self.items.weight
        self.net = make_net()
        self.remote_net = remote_net
        self.autocast = autocast
        self.to(dtype)

    def forward(self, samples: Samples) -> Tensor:
        weights_L = None if samples.weights_L is None else samples.weights_L.to(self.users.weight.dtype)
        bought_BD = self.bought(samples.bought_L, samples.bought_offsets, weights_L)
        pooled_BE = torch.cat([self.users(samples.user_B), self.items(samples.item_B), bought_BD], dim=1)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            hidden_BH = self.net.interaction(self.net.bottom(samples.dense_BF), pooled_BE)
        if self.remote_net is not None:
            hidden_BH = self.remote_net(hidden_BH.float() if self.autocast else hidden_BH)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            logits_B: Tensor = self.net.head(hidden_BH)
        return logits_B.float() if self.autocast else logits_B

    def loss(self, samples: Samples) -> Tensor:
        return F.binary_cross_entropy_with_logits(self(samples), samples.labels_B)

    def tables(self) -> list[nn.Parameter]:
        return [self.users.weight, self.items.weight]

    def dense(self) -> list[nn.Parameter]:
        remote = [] if self.remote_net is None else self.remote_net.parameters()
        return [*self.net.parameters(), *remote]


def make_reference(
    optimizer: OptimizerSpec = SGD,
    pooling: str = "sum",
    remote_net: nn.Module | None = None,
    dense: DenseSection = PLAIN_SGD,
    dtype: str = "float32",
) -> Reference:
    config = RunConfig(cluster=ClusterSection(trainers=1), dense=dense, train=TrainSection(dtype=dtype))
    tables = [
        TableSpec("users", USERS, DIM, Pooling(pooling), ("user",), optimizer, 1.0),
        TableSpec("items", ITEMS, DIM, Pooling(pooling), ("item", "bought"), optimizer, 1.0),
    ]
    return Reference(config, INPUT_SPEC, tables, initial_rows(), make_net(), remote_net, STEPS)


def train_both(
    plain: Plain, reference: Reference, steps: Iterable[Samples], *optimizers: torch.optim.Optimizer
) -> None:
    """Take all steps in both; losses and parameters are equal bit for bit."""
    for step in steps:
        plain.zero_grad()
        loss = plain.loss(step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        assert reference.step([step.batch()]) == loss.item()
    ours = [*reference.tables.values(), *reference.nets[0].parameters()]
    ours += reference.remote_net.parameters() if reference.remote_net is not None else []
    for mine, theirs in zip(ours, [*plain.tables(), *plain.dense()], strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=0, atol=0)
    assert not torch.equal(reference.tables["items"], initial_rows()["items"].to(plain.items.weight.dtype))


@pytest.mark.parametrize(
    ("remote", "dtype", "autocast"),
    [(False, "float32", "none"), (True, "float64", "none"), (True, "float32", "bfloat16")],
)
def test_one_trainer_has_the_bits_of_torch(remote: bool, dtype: str, autocast: str) -> None:
    """Autocast holds for the local stages only; another test has each optimizer of rows."""
    remote_net = make_remote_net() if remote else None
    plain = Plain(getattr(torch, dtype), "sum", copy.deepcopy(remote_net), autocast == "bfloat16")
    dense = DenseSection(optimizer="Adam(betas = [0.5, 0.9])", learning_rate=0.02, autocast=autocast)
    spec = OptimizerSpec("adagrad", 0.3, 1e-4)
    reference = make_reference(spec, remote_net=remote_net, dense=dense, dtype=dtype)
    rows = torch.optim.Adagrad(plain.tables(), 0.3, eps=1e-4)
    adam = torch.optim.Adam(plain.dense(), 0.02, (0.5, 0.9))
    steps = list(samples(dtype=getattr(torch, dtype)))
    train_both(plain, reference, steps, rows, adam)
    for name_in_net, parameter in plain.net.named_parameters():
        for key, value in reference.dense_state(reference.nets[0])[name_in_net].items():
            assert torch.equal(value, adam.state[parameter][key])
    logits_B = reference.outputs(steps[-1].batch())
    assert torch.equal(logits_B, plain(steps[-1]))
    plain.autocast = False
    assert torch.equal(logits_B, plain(steps[-1])) == (autocast == "none")


@pytest.mark.parametrize(
    ("pooling", "weighted"), [("sum", False), ("mean", False), ("max", False), ("sum", True)]
)
def test_bags_equal_torch_and_untouched_rows_stay(pooling: str, weighted: bool) -> None:
    plain, reference = Plain(mode=pooling), make_reference(pooling=pooling)
    groups = [{"params": plain.tables(), "lr": 0.3}, {"params": plain.dense(), "lr": 0.1}]
    train_both(plain, reference, samples(every_row=False, weighted=weighted), torch.optim.SGD(groups))
    assert torch.equal(reference.tables["users"][-1], initial_rows()["users"][-1])


ROWS, ROW_DIM, ROW_STEPS = 9, 5, 12
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


def initial_table(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(ROWS, ROW_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(
        dtype
    )


def row_steps(dtype: torch.dtype = torch.float64) -> Iterator[tuple[Tensor, Tensor]]:
    """Touched rows and their gradients; the last row is never touched, the first one only once."""
    generator = torch.Generator().manual_seed(1)
    for step in range(ROW_STEPS):
        ids_U = 1 + torch.randperm(ROWS - 2, generator=generator)[: 1 + step % 5].sort().values
        if step == 3:
            ids_U = torch.tensor([0])
        yield ids_U, torch.randn(len(ids_U), ROW_DIM, generator=generator, dtype=torch.float64).to(dtype)


def begin_rows(spec: OptimizerSpec, dtype: torch.dtype = torch.float64) -> tuple[Tensor, State]:
    table_RD = initial_table(dtype)
    return table_RD, initial_state(spec, table_RD)


def train_rows(spec: OptimizerSpec, dtype: torch.dtype = torch.float64) -> tuple[Tensor, State]:
    table_RD, state = begin_rows(spec, dtype)
    for ids_U, grad_UD in row_steps(dtype):
        update_rows(spec, RATE, table_RD, state, ids_U, grad_UD)
    return table_RD, state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("decay", [0.0, DECAY])
@pytest.mark.parametrize("name", TORCH)
def test_each_row_has_the_bits_of_its_own_optimizer(name: str, decay: float, dtype: torch.dtype) -> None:
    table_RD, state = train_rows(make_spec(name, decay), dtype)
    rows = [nn.Parameter(row) for row in initial_table(dtype)]
    optimizers = [TORCH[name]([row], decay) for row in rows]
    for ids_U, grad_UD in row_steps(dtype):
        for row, gradient in zip(ids_U.tolist(), grad_UD, strict=True):
            rows[row].grad = gradient
            optimizers[row].step()
    for row, (parameter, optimizer) in enumerate(zip(rows, optimizers, strict=True)):
        assert torch.equal(table_RD[row], parameter.detach()), row
        for ours, theirs in STATE_NAMES.get(name, {}).items():
            expected = optimizer.state[parameter].get(theirs, 0.0) if optimizer.state else 0.0
            assert torch.equal(state[ours][row], torch.zeros_like(state[ours][row]) + expected), ours
    assert torch.equal(table_RD[-1], initial_table(dtype)[-1])
    assert not torch.equal(table_RD[:-1], initial_table(dtype)[:-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("decay", [0.0, DECAY])
@pytest.mark.parametrize("name", TORCH)
def test_whole_table_equals_nn_embedding(name: str, decay: float, dtype: torch.dtype) -> None:
    spec = dataclasses.replace(make_spec(name, decay), all_rows=True)
    table_RD, state = begin_rows(spec, dtype)
    embedding = nn.Embedding.from_pretrained(initial_table(dtype), freeze=False)
    optimizer = TORCH[name]([embedding.weight], decay)
    for step, (ids_U, grad_UD) in enumerate(row_steps(dtype)):
        optimizer.param_groups[0]["lr"] = rate = RATE / (1 + step % 3)
        optimizer.zero_grad()
        embedding(ids_U).backward(grad_UD)
        optimizer.step()
        update_rows(spec, rate, table_RD, state, ids_U, grad_UD)
    assert torch.equal(table_RD, embedding.weight.detach())
    for ours, theirs in STATE_NAMES.get(name, {}).items():
        expected = optimizer.state[embedding.weight][theirs]
        assert torch.equal(state[ours], torch.zeros_like(state[ours]) + expected), ours
    assert torch.equal(table_RD[-1], initial_table(dtype)[-1]) == (not decay)


@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_rowwise_adagrad_follows_its_formula(decay: float) -> None:
    table_RD, state = train_rows(make_spec("rowwise_adagrad", decay))
    expected, total = initial_table().tolist(), [0.0] * ROWS
    for ids_U, grad_UD in row_steps():
        for row, values in zip(ids_U.tolist(), grad_UD.tolist(), strict=True):
            gradient = [g + decay * w for g, w in zip(values, expected[row], strict=True)]
            total[row] += sum(g * g for g in gradient) / ROW_DIM
            for d, g in enumerate(gradient):
                expected[row][d] -= RATE * g / (math.sqrt(total[row]) + EPS)
    torch.testing.assert_close(table_RD, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state["sum"], torch.tensor(total, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_ftrl_minimizes_its_penalized_objective() -> None:
    """Of gradients g_s at rows w_s: sum(g_s) w + l1 |w| + l2/2 w^2 + sum over s of sigma_s/2 (w - w_s)^2.

    The first sigma is beta/alpha, centered where the penalties' own pull keeps the initial_table row.
    """
    beta, l1, l2 = 0.5, 1.0, 0.3
    spec = make_spec("ftrl", l2, beta, l1)
    table_RD, state = begin_rows(spec)
    linear_RD = -table_RD * (beta / RATE + l2) - table_RD.sign() * l1
    quadratic_RD = torch.full_like(table_RD, beta / RATE + l2)
    square_RD = torch.zeros_like(table_RD)
    zeros = 0
    for ids_U, grad_UD in row_steps():
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

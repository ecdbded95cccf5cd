"""Training over RPC of a process with itself equals plain torch: bit for bit, or in float64 to 1e-12."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.vectors import Concatenation
from torch import Tensor, nn

from hybrid import wire
from hybrid.batch import Batch, SparseFeatures
from hybrid.clock import PHASES, StepClock
from hybrid.dense.nets import DenseNet
from hybrid.dense.optimizer import DenseOptimizer
from hybrid.dense.remote import HostedNet
from hybrid.embedding.placement import place
from hybrid.embedding.spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.embedding.worker.shards import TableShards
from hybrid.errors import NonFiniteError
from hybrid.hosting.barrier import UpdateBarrier
from hybrid.hosting.hosted import Hosted
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.own_code.traces import words_of
from hybrid.steps.rules import UpdateMode, UpdateRules
from hybrid.steps.schedule import Schedule
from hybrid.steps.ticket import Purpose, Ticket
from hybrid.topology import MASTER
from hybrid.training.arrangement import Arrangement
from hybrid.training.ddp import DdpMode, DdpModel
from hybrid.training.feed import Feed
from hybrid.training.guard import Guard
from hybrid.training.model import HybridModel
from hybrid.training.step import StepResult, predict_step, train_step

pytestmark = pytest.mark.usefixtures("loopback")

STEPS, FEW = 50, 8
SIZE = 6
RATE = 0.1
ROWS = (7, 12)
DIM = 4
HIDDEN = 3 + 2 * DIM
TABLES = [
    TableSpec(n, r, DIM, Pooling.SUM, (n,), OptimizerSpec("sgd", RATE), 0.5)
    for n, r in zip("ab", ROWS, strict=True)
]
MULTI_HOT = pytest.mark.parametrize("multi_hot", [False, True], ids=["one id a sample", "bags"])
TRAIN_MODES = pytest.mark.parametrize("mode", list(UpdateMode))


def dense_net() -> DenseNet:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return DenseNet(nn.Linear(2, 3), Concatenation(), nn.Linear(HIDDEN, 1))


class RemoteLayer(HostedNet):
    def __init__(self, rules: UpdateRules, dtype: torch.dtype) -> None:
        net = make_layer().to(dtype)
        super().__init__(net, torch.optim.SGD(net.parameters(), lr=RATE), rules)


def make_layer() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(9)
        return nn.Linear(HIDDEN, HIDDEN)


class Job:
    """All that a run consists of, in this process: tables and perhaps a net across RPC, and one trainer."""

    def __init__(self, rules: UpdateRules, multi_hot: bool, dtype: torch.dtype, remote: bool) -> None:
        self._placement = place(TABLES, 1)
        module = wire.create_module(MASTER, TableShards, self._placement, 0, rules, dtype)
        self.tables = wire.RemoteTables(MASTER, module)
        self.tables.call(TableShards.initialise, 5).wait()
        spec = InputSpec((), tuple(FeatureSpec(t.name, t.num_rows, multi_hot) for t in TABLES))
        self.embeddings = Embeddings(TABLES, spec, self._placement, {0: self.tables})
        self.remote_net: wire.RemoteNet | None = None
        if remote:
            layer = wire.create_module(MASTER, RemoteLayer, rules, dtype)
            self.remote_net = wire.RemoteNet(MASTER, layer)
        self.hosts: list[wire.RemoteHosted[Any]] = [self.tables]
        self.hosts += [self.remote_net] if self.remote_net else []
        self.net, self.clock = dense_net(), StepClock()
        assert dist.group.WORLD is not None
        group = dist.group.WORLD
        self.model = HybridModel(self.net, self.remote_net, dtype)
        self._model = DdpModel(self.model, DdpMode.OUTSIDE, Arrangement(group))
        self._optimizer = DenseOptimizer(torch.optim.SGD(self.net.parameters(), lr=RATE), Schedule())
        self._guard = Guard(rules, self.hosts, group, torch.device("cpu"))
        self._feed = Feed(self.embeddings, [self.tables], 0, rules.mode, rules.parts, self.clock)

    def train(self, batches: Sequence[Batch]) -> list[StepResult]:
        """All steps, and the update of the last."""
        self._feed.begin(iter(batches), 0)
        results = [
            train_step(self._model, micros, self._optimizer, self._guard, step, self.clock)
            for step, (_, micros) in enumerate(self._feed)
        ]
        self.predict(batches[0], len(batches))
        return results

    def predict(self, batch: Batch, step: int) -> Tensor:
        ticket = Ticket(0, step, step, purpose=Purpose.PREDICT)
        return predict_step(self.model, self.embeddings, batch, ticket, self.clock)

    def rows(self) -> list[Tensor]:
        shards = self.tables.local_value()
        return [shards.shard_tensors(s)["weight"] for s in self._placement.shards]

    def parameters(self) -> list[Tensor]:
        """Of every side: tables, local net, remote net."""
        remote = self.remote_net.local_value().parameter_list if self.remote_net else []
        return [*self.rows(), *self.net.parameters(), *remote]


@contextmanager
def running(
    rules: UpdateRules,
    *,
    multi_hot: bool = False,
    dtype: torch.dtype = torch.float32,
    remote: bool = False,
) -> Iterator[tuple[Job, Plain]]:
    """A job, and the same in plain torch."""
    job = Job(rules, multi_hot, dtype, remote)
    plain = Plain(job.rows(), dtype, rules.clip_norm, make_layer() if remote else nn.Identity())
    try:
        yield job, plain
    finally:
        for host in job.hosts:
            host.call(Hosted.close).wait()


class Plain:
    """One process of plain torch: dense gradients, whole batches, no RPC."""

    def __init__(
        self, rows: list[Tensor], dtype: torch.dtype, clip_norm: float | None, between: nn.Module
    ) -> None:
        self.tables = [rows_RD.clone().requires_grad_() for rows_RD in rows]
        self.net, self._between = dense_net().to(dtype), between.to(dtype)
        self._dtype = dtype
        self._clip_norm = clip_norm
        self.num_clipped = 0
        self._optimizer = torch.optim.SGD(self.parameters(), lr=RATE)

    def parameters(self) -> list[Tensor]:
        return [*self.tables, *self.net.parameters(), *self._between.parameters()]

    def train(self, batches: Sequence[Batch], delay: int = 0) -> list[float]:
        """Losses; each step reads the rows as they were ``delay`` updates before."""
        losses, history = [], [[table.detach().clone() for table in self.tables]]
        for step, batch in enumerate(batches):
            seen = [rows_RD.clone().requires_grad_() for rows_RD in history[max(0, step - delay)]]
            loss = self._loss(batch, seen)
            self._optimizer.zero_grad()
            loss.backward()
            for table, rows_RD in zip(self.tables, seen, strict=True):
                table.grad = rows_RD.grad
            if self._clip_norm is not None:
                norm = nn.utils.clip_grad_norm_(self.parameters(), self._clip_norm)
                self.num_clipped += int(norm > self._clip_norm)
            self._optimizer.step()
            losses.append(loss.item())
            history.append([table.detach().clone() for table in self.tables])
        return losses

    def _loss(self, batch: Batch, tables: Sequence[Tensor]) -> Tensor:
        size = len(batch.labels)
        ids, offsets, _, _ = batch.sparse_features
        offsets = torch.arange(2 * size + 1) if offsets is None else offsets
        halves = (offsets[: size + 1], offsets[size:])
        pooled = [
            F.embedding_bag(ids[h[0] : h[-1]], t, h - h[0], mode="sum", include_last_offset=True)
            for h, t in zip(halves, tables, strict=True)
        ]
        bottom = self.net.bottom(batch.dense_features.to(self._dtype))
        hidden = self._between(self.net.interaction(bottom, torch.cat(pooled, 1)))
        logits = self.net.head(hidden).view(-1)
        return F.binary_cross_entropy_with_logits(logits, batch.labels.to(self._dtype))


def make_batches(multi_hot: bool) -> list[Batch]:
    generator = torch.Generator().manual_seed(11)
    made = []
    for _ in range(STEPS):
        lengths = [1] * SIZE if not multi_hot else [0, 1, 2, 3, 1, 0]
        bags = [[torch.randint(0, r, (n,), generator=generator).tolist() for n in lengths] for r in ROWS]
        sparse = SparseFeatures.from_bags(bags)
        if not multi_hot:
            sparse = sparse._replace(offsets=None)
        labels = torch.randint(0, 2, (SIZE,), generator=generator).float()
        made.append(Batch(torch.randn(SIZE, 2, generator=generator), sparse, labels, SIZE))
    return made


def losses_of(results: Sequence[StepResult]) -> list[float]:
    return [result.loss for result in results]


def assert_same_bits(job: Job, plain: Plain) -> None:
    for ours, theirs in zip(job.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def assert_close(job: Job, plain: Plain) -> None:
    """In float64, where only the order of sums differs."""
    for ours, theirs in zip(job.parameters(), plain.parameters(), strict=True):
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@MULTI_HOT
@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote net"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_equals_plain_sgd_bit_for_bit(multi_hot: bool, remote: bool, dtype: torch.dtype) -> None:
    made = make_batches(multi_hot)
    with running(UpdateRules(1), multi_hot=multi_hot, remote=remote, dtype=dtype) as (job, plain):
        assert losses_of(job.train(made)) == plain.train(made)
        assert_same_bits(job, plain)
        seconds = job.clock.take()
        assert all(seconds[phase] > 0 for phase in PHASES)


@MULTI_HOT
@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote net"])
def test_pipelined_it_equals_updates_delayed_by_one_step_bit_for_bit(multi_hot: bool, remote: bool) -> None:
    """Rows lack the update of the step before; dense nets do not."""
    made = make_batches(multi_hot)
    rules = UpdateRules(1, UpdateMode.PIPELINED)
    with running(rules, multi_hot=multi_hot, remote=remote) as (job, plain):
        losses = losses_of(job.train(made))
        assert losses == plain.train(made, delay=1)
        assert_same_bits(job, plain)
        staleness = job.tables.call_barrier(UpdateBarrier.take_staleness).wait()
        assert (staleness.count, staleness.total) == (STEPS, STEPS - 1)
    with running(UpdateRules(1), multi_hot=multi_hot, remote=remote) as (_, plain):
        assert losses != plain.train(made)


@TRAIN_MODES
@MULTI_HOT
@pytest.mark.parametrize("parts", [1, SIZE + 1])
def test_micro_batches_add_up_to_the_whole_batch(mode: UpdateMode, multi_hot: bool, parts: int) -> None:
    """Of different sizes, and one of them empty, where a batch has fewer samples than parts."""
    made = make_batches(multi_hot)[:FEW]
    rules = UpdateRules(1, mode, parts)
    with running(rules, multi_hot=multi_hot, dtype=torch.float64, remote=True) as (job, plain):
        results = job.train(made)
        expected = plain.train(made, delay=0 if mode is UpdateMode.SYNC else 1)
        assert losses_of(results) == pytest.approx(expected, rel=1e-12)
        assert_close(job, plain)
        assert {len(result.logits) for result in results} == {SIZE}


@pytest.mark.parametrize("mode", [UpdateMode.SYNC, UpdateMode.PIPELINED])
@pytest.mark.parametrize("parts", [1, 2])
def test_clipping_is_that_of_all_gradients_together(mode: UpdateMode, parts: int) -> None:
    made = make_batches(multi_hot=True)[: 2 * FEW]
    rules = UpdateRules(1, mode, parts, clip_norm=0.5)
    delay = 1 if mode is UpdateMode.PIPELINED else 0
    with running(rules, multi_hot=True, dtype=torch.float64, remote=True) as (job, plain):
        results = job.train(made)
        assert losses_of(results) == pytest.approx(plain.train(made, delay), rel=1e-12)
        assert_close(job, plain)
        assert 0 < plain.num_clipped < len(made)
        assert not any(result.is_skipped for result in results)


BAD_STEP = 5


def with_a_bad_batch() -> list[Batch]:
    made = make_batches(multi_hot=False)[:FEW]
    dense_BF = made[BAD_STEP].dense_features.clone()
    dense_BF[2, 1] = math.nan
    made[BAD_STEP] = made[BAD_STEP]._replace(dense_features=dense_BF)
    return made


@pytest.mark.parametrize("parts", [1, 2])
def test_a_skipped_step_leaves_no_trace(parts: int) -> None:
    made = with_a_bad_batch()
    rules = UpdateRules(1, parts=parts, check_finite=False)
    with running(rules, remote=True, dtype=torch.float64) as (job, plain):
        results = job.train(made)
        assert [step for step, result in enumerate(results) if result.is_skipped] == [BAD_STEP]
        plain.train([*made[:BAD_STEP], *made[BAD_STEP + 1 :]])
        assert_close(job, plain)


def test_a_loss_that_is_not_finite_stops_training() -> None:
    with running(UpdateRules(1)) as (job, _):
        with pytest.raises(NonFiniteError, match=rf"^step {BAD_STEP}: the loss of trainer 0 is nan: the num"):
            job.train(with_a_bad_batch())


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise KeyError("mine")


class Backwards(nn.Module):
    """Fails where distributed autograd forgets what has failed."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Refusing.apply(x)  # type: ignore[no-untyped-call]
        return output


@pytest.mark.parametrize("remote", [False, True])
def test_an_exception_of_the_backward_pass_keeps_its_place(remote: bool) -> None:
    with running(UpdateRules(1), remote=remote) as (job, _):
        job.model.stages.head = job.net.head = nn.Sequential(job.net.head, Backwards())
        with pytest.raises(KeyError) as caught:
            job.train(make_batches(multi_hot=False)[:1])
        assert re.search(r"test_training.py:\d+, in backward: KeyError: 'mine'$", words_of(caught.value))


def test_an_exception_of_the_forward_pass_names_its_layer() -> None:
    with running(UpdateRules(1)) as (job, _):
        head = nn.Sequential(job.net.head, nn.Linear(5, 1))
        job.model.stages.head = job.net.head = head
        with pytest.raises(RuntimeError, match="shapes") as caught:
            job.train(make_batches(multi_hot=False)[:1])
        assert "; in head.1 of the net, Linear(in_features=5," in words_of(caught.value)


def test_prediction_needs_no_labels_and_changes_nothing() -> None:
    made = make_batches(multi_hot=False)
    with running(UpdateRules(1), remote=True) as (job, _):
        job.train(made[:3])
        before = [parameter.detach().clone() for parameter in job.parameters()]
        first, unlabelled = made[0], made[0]._replace(labels=torch.empty(0))
        predicted_B = job.predict(first, 3)
        assert torch.equal(job.predict(unlabelled, 3), predicted_B)
        assert not predicted_B.requires_grad
        assert all(torch.equal(now, then) for now, then in zip(job.parameters(), before, strict=True))

"""Training over RPC of a process with itself: where exceptions come from, and predictions."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.seeded import seeded
from support.shards import PATIENCE_SECONDS
from torch import Tensor, nn

from hybrid import transport
from hybrid.batch import Batch, SparseFeatures
from hybrid.config import RunConfig
from hybrid.dense.dense_optimizer import DenseOptimizer
from hybrid.dense.hosted_net import HostedNet
from hybrid.embedding.placement import place
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.engine.ddp import DdpMode, DdpModel
from hybrid.engine.dense_placement import DensePlacement
from hybrid.engine.hybrid_model import HybridModel
from hybrid.engine.losses import Objective
from hybrid.engine.step_feed import Feed
from hybrid.engine.train_step import StepResult, predict_step, train_step
from hybrid.engine.update_guard import Guard
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.models.dense_net import Concatenation, DenseNet
from hybrid.primitives.step_timings import StepClock
from hybrid.protocol.learning_rate_schedule import Schedule
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import UpdateMode, UpdateRules
from hybrid.server.hosted_module import Hosted
from hybrid.topology import MASTER
from hybrid.user_code.tracebacks import describe_error

pytestmark = pytest.mark.usefixtures("loopback")

STEPS = 3
DTYPE = torch.float64
SIZE = 6
RATE = 0.1
OBJECTIVE = Objective(RunConfig().all_tasks)
ROWS = (7, 12)
DIM = 4
HIDDEN = 3 + 2 * DIM
TABLES = [
    TableSpec(n, r, DIM, Pooling.SUM, (n,), OptimizerSpec("sgd", RATE), 0.5)
    for n, r in zip("ab", ROWS, strict=True)
]


def dense_net() -> DenseNet:
    bottom, head = seeded(lambda: nn.Linear(2, 3)), seeded(lambda: nn.Linear(HIDDEN, 1))
    return DenseNet(bottom, Concatenation(), head)


def make_layer() -> nn.Linear:
    return seeded(lambda: nn.Linear(HIDDEN, HIDDEN))


class RemoteLayer(HostedNet):
    def __init__(self, rules: UpdateRules) -> None:
        net = make_layer().to(DTYPE)
        super().__init__(net, torch.optim.SGD(net.parameters(), lr=RATE), rules)


class Job:
    """All that a run consists of, in this process: tables and perhaps a net across RPC, and one trainer."""

    def __init__(self, rules: UpdateRules, remote: bool) -> None:
        self._placement = place(TABLES, 1)
        shards = transport.create_module(MASTER, TableShards, self._placement, 0, rules, DTYPE)
        self.tables = transport.RemoteTables(MASTER, shards)
        self.tables.call(TableShards.initialise, 5).wait()
        self.spec = InputSpec((), tuple(FeatureSpec(t.name, t.num_rows) for t in TABLES))
        self.embeddings = Embeddings(TABLES, self.spec, self._placement, {0: self.tables})
        self.hosts: list[transport.RemoteHosted[Any]] = [self.tables]
        self.remote_net: transport.RemoteNet | None = None
        if remote:
            self.remote_net = transport.RemoteNet(MASTER, transport.create_module(MASTER, RemoteLayer, rules))
            self.hosts.append(self.remote_net)
        self.net, self.clock = dense_net(), StepClock()
        group = dist.group.WORLD
        assert group is not None
        self.model = HybridModel(self.net, self.remote_net, DTYPE)
        self._model = DdpModel(self.model, DdpMode.OUTSIDE, DensePlacement(group))
        self._optimizer = DenseOptimizer(torch.optim.SGD(self.net.parameters(), lr=RATE), Schedule())
        self._guard = Guard(rules, self.hosts, group, torch.device("cpu"))
        self._spans = remote or rules.mode is UpdateMode.SYNC
        self._feed = Feed[Batch](self.embeddings, [self.tables], 0, rules.mode, rules.parts, self.clock)

    def train(self, batches: Sequence[Batch]) -> list[StepResult]:
        """All steps, and the update of the last."""
        self._feed.begin(iter(batches), 0)
        results = [
            train_step(
                self._model,
                micros,
                OBJECTIVE,
                self._optimizer,
                self._guard,
                step,
                self.clock,
                self._spans,
            )
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
def running(rules: UpdateRules, *, remote: bool = False) -> Iterator[Job]:
    job = Job(dataclasses.replace(rules, timeout_seconds=PATIENCE_SECONDS), remote)
    try:
        yield job
    finally:
        for host in job.hosts:
            host.call(Hosted.close).wait()


def make_batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(11)
    batches = []
    for _ in range(STEPS):
        ids_KB = [torch.randint(rows, (SIZE,), generator=generator) for rows in ROWS]
        labels = torch.randint(0, 2, (SIZE,), generator=generator).float()
        sparse = SparseFeatures(torch.cat(ids_KB), None, None, len(ROWS))
        batches.append(Batch(torch.randn(SIZE, 2, generator=generator), sparse, labels, SIZE))
    return batches


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
@pytest.mark.parametrize("mode", [UpdateMode.SYNC, UpdateMode.PIPELINED])
def test_an_exception_of_the_backward_pass_keeps_its_place(mode: UpdateMode, remote: bool) -> None:
    with running(UpdateRules(1, mode), remote=remote) as job:
        job.model.stages.head = job.net.head = nn.Sequential(job.net.head, Backwards())
        with pytest.raises(KeyError) as caught:
            job.train(make_batches()[:1])
        assert re.search(
            r"test_training.py:\d+, in backward: KeyError: 'mine'$", describe_error(caught.value)
        )


def test_an_exception_of_the_forward_pass_names_its_layer() -> None:
    with running(UpdateRules(1)) as job:
        head = nn.Sequential(job.net.head, nn.Linear(5, 1, dtype=DTYPE))
        job.model.stages.head = job.net.head = head
        with pytest.raises(RuntimeError, match="shapes") as caught:
            job.train(make_batches()[:1])
        assert "; in head.1 of the net, Linear(in_features=5," in describe_error(caught.value)


def test_prediction_needs_no_labels_and_changes_nothing() -> None:
    made = make_batches()
    with running(UpdateRules(1), remote=True) as job:
        job.train(made)
        before = [parameter.detach().clone() for parameter in job.parameters()]
        first, unlabelled = made[0], made[0]._replace(labels=torch.empty(0))
        predicted_B = job.predict(first, 3)
        assert torch.equal(job.predict(unlabelled, 3), predicted_B)
        assert not predicted_B.requires_grad
        assert all(torch.equal(now, then) for now, then in zip(job.parameters(), before, strict=True))

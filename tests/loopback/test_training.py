"""Training over RPC of a process with itself equals plain torch, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid import wire
from hybrid.batch import Batch, SparseFeatures
from hybrid.clock import PHASES, StepClock
from hybrid.dense.ddp import DdpMode, parallelise
from hybrid.dense.nets import DenseNet
from hybrid.dense.optimizer import DenseOptimizer, make_optimizer
from hybrid.embedding.lookup import Embeddings
from hybrid.embedding.placement import Placement, plan
from hybrid.embedding.shard import TableShards
from hybrid.embedding.spec import FeatureSpec, InputSpec, OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.update import UpdateMode
from hybrid.model import HybridModel
from hybrid.step import ContextOptimizer, predict_step, train_step
from hybrid.topology import MASTER

pytestmark = pytest.mark.usefixtures("loopback")

STEPS = 50
RATE = 0.1
ROWS = (7, 12)
DIM = 4
TABLES = [
    TableSpec(n, r, DIM, Pooling.SUM, (n,), OptimizerSpec("sgd", RATE), 0.5)
    for n, r in zip("ab", ROWS, strict=True)
]


class Concatenation(nn.Module):
    def forward(self, bottom_BH: Tensor, pooled_BE: Tensor) -> Tensor:
        return torch.cat([bottom_BH, pooled_BE], dim=1)


def dense_net(out: int = 1) -> DenseNet:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return DenseNet(nn.Linear(2, 3), Concatenation(), nn.Linear(3 + 2 * DIM, out))


class Remote:
    """The tables, across RPC, and a stub to look into them."""

    def __init__(self, multi_hot: bool) -> None:
        self.placement: Placement = plan(TABLES, 1)
        rref = wire.create_module(MASTER, TableShards, self.placement, 0, 1, UpdateMode.SYNC, 10.0)
        self.tables = wire.RemoteTables(MASTER, rref)
        self.tables.call("initialise", 5).wait()
        spec = InputSpec((), tuple(FeatureSpec(t.name, t.num_rows, multi_hot) for t in TABLES))
        self.embeddings = Embeddings(TABLES, spec, self.placement, {0: self.tables})

    def rows(self) -> list[Tensor]:
        shards = self.tables.local_value()
        return [shards.shard_tensors(s)["weight"] for s in self.placement.shards]


@pytest.fixture(params=[False, True], ids=["one id a sample", "bags"])
def remote(request: pytest.FixtureRequest) -> Iterator[Remote]:
    made = Remote(request.param)
    yield made
    made.tables.call("close").wait()


def batches(multi_hot: bool) -> list[Batch]:
    generator = torch.Generator().manual_seed(11)
    made = []
    for _ in range(STEPS):
        lengths = [1] * 6 if not multi_hot else [0, 1, 2, 3, 1, 0]
        bags = [[torch.randint(0, r, (n,), generator=generator).tolist() for n in lengths] for r in ROWS]
        sparse = SparseFeatures.from_bags(bags)
        if not multi_hot:
            sparse = sparse._replace(offsets=None)
        labels = torch.randint(0, 2, (6,), generator=generator).float()
        made.append(Batch(torch.randn(6, 2, generator=generator), sparse, labels, 6))
    return made


def plain_losses(
    batches: Sequence[Batch], rows: list[Tensor], net: nn.Module, between: nn.Module
) -> list[float]:
    """Losses of plain torch, training ``rows``, ``net`` and ``between`` in place."""
    tables = [row.clone().requires_grad_() for row in rows]
    optimizer = torch.optim.SGD([*tables, *net.parameters(), *between.parameters()], lr=RATE)
    losses = []
    for batch in batches:
        size = len(batch.labels)
        offsets = batch.sparse_features.offsets
        offsets = torch.arange(2 * size + 1) if offsets is None else offsets
        ids = batch.sparse_features.ids_L
        halves = (offsets[: size + 1], offsets[size:])
        pooled = [
            F.embedding_bag(ids[h[0] : h[-1]], t, h - h[0], mode="sum", include_last_offset=True)
            for h, t in zip(halves, tables, strict=True)
        ]
        assert isinstance(net, DenseNet)
        hidden = net.interaction(net.bottom(batch.dense_features), torch.cat(pooled, 1))
        logits = net.head(between(hidden)).view(-1)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for row, table in zip(rows, tables, strict=True):
        row.copy_(table.detach())
    return losses


def test_it_equals_plain_sgd_bit_for_bit(remote: Remote, request: pytest.FixtureRequest) -> None:
    multi_hot = "bags" in request.node.name
    plain_rows = [rows.clone() for rows in remote.rows()]
    plain_net, net = dense_net(), dense_net()
    made = batches(multi_hot)
    expected = plain_losses(made, plain_rows, plain_net, nn.Identity())
    assert dist.group.WORLD is not None
    model = parallelise(HybridModel(remote.embeddings, net), DdpMode.OUTSIDE, dist.group.WORLD)
    optimizers = [DenseOptimizer(make_optimizer(net.parameters(), "SGD", RATE))]
    clock = StepClock()
    losses = [train_step(model, b, optimizers, step, clock).loss for step, b in enumerate(made)]
    predict_step(model, made[0], STEPS, clock)  # waits for the last update
    assert losses == expected
    assert all(torch.equal(ours, plain) for ours, plain in zip(remote.rows(), plain_rows, strict=True))
    for ours, plain in zip(net.state_dict().values(), plain_net.state_dict().values(), strict=True):
        assert torch.equal(ours, plain)
    seconds = clock.take()
    assert all(seconds[phase] > 0 for phase in PHASES if phase != "data")


def make_remote_layer() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(9)
        return nn.Linear(3 + 2 * DIM, 3 + 2 * DIM)


class RemoteLayer(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(make_remote_layer())


@pytest.mark.parametrize("remote", [False], indirect=True)
def test_a_remote_net_is_stepped_by_the_distributed_optimizer(remote: Remote) -> None:
    plain_rows = [rows.clone() for rows in remote.rows()]
    plain_net, net, plain_layer = dense_net(), dense_net(), make_remote_layer()
    made = batches(multi_hot=False)
    expected = plain_losses(made, plain_rows, plain_net, plain_layer)
    remote_net = wire.RemoteNet(MASTER, wire.create_module(MASTER, RemoteLayer))
    model = HybridModel(remote.embeddings, net, remote_net)
    optimizers: list[ContextOptimizer] = [
        DenseOptimizer(make_optimizer(net.parameters(), "SGD", RATE)),
        remote_net.optimizer(make_optimizer, "SGD", RATE),
    ]
    losses = [train_step(model, b, optimizers, step, StepClock()).loss for step, b in enumerate(made)]
    assert losses == expected
    state = remote_net.remote().call("state_dict").wait()
    assert torch.equal(state["0.weight"], plain_layer.weight)

"""The hybrid model of torch's ``ddp_under_dist_autograd_test.py``, built from this project's parts.

:class:`Tables` and :class:`Net` are on a worker, as RemoteEM and RemoteNet upstream. :class:`Trainer` and
:func:`train` are Trainer and do_test_on_master; trainers without a batch go on with empty ones, without join.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid import transport
from hybrid.batch import Batch, SparseFeatures
from hybrid.config.loading import load_config
from hybrid.dense.hosted_net import HostedNet
from hybrid.embedding.placement import place
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.engine.ddp import DensePlacement
from hybrid.engine.hybrid_model import HybridModel
from hybrid.engine.step_engine import StepEngine
from hybrid.engine.uneven_batches import align_batches
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.models.dense_net import Concatenation, DenseNet
from hybrid.primitives.step_timings import StepClock
from hybrid.updates.hosted_module import HostedModule
from hybrid.updates.update_rules import UpdateRules
from workers.rendezvous.bootstrap import JoinedCluster

NUM_ROWS, DIM, NUM_DENSE, HIDDEN, OUT = 2, 3, 2, 3, 1
NUM_EXAMPLES = 16
ROW_VALUE = 0.5


def get_linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a layer without bias whose first weight is -1 and whose other weights are 1."""
    layer = nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)[0, 0] = -1.0
    return layer


def get_training_examples(num_trainers: int) -> list[Batch]:
    """Return one batch for each trainer; ``labels`` are the factors of outputs, -1 or 1.

    Every example has a twin of the same features and the opposite value, at another trainer: over all
    trainers, their gradients cancel.
    """
    examples = [
        (value, (x, y), row)
        for value in (-1.0, 1.0)
        for x, y, row in itertools.product((-value, value), (value, -value), range(NUM_ROWS))
    ]
    size = NUM_EXAMPLES // num_trainers
    return [batch_of(examples[start : start + size]) for start in range(0, NUM_EXAMPLES, size)]


def batch_of(examples: list[tuple[float, tuple[float, float], int]]) -> Batch:
    """Return a batch of examples, each with value, dense features and row."""
    values, dense, rows = zip(*examples, strict=True)
    sparse = SparseFeatures(torch.tensor(rows), None, None, num_features=1)
    return Batch(torch.tensor(dense), sparse, torch.tensor(values), NUM_EXAMPLES)


SECONDS = 10.0
RATE = 0.125  # a power of two: sums and products of these small numbers stay exact
TABLE = TableSpec("ids", NUM_ROWS, DIM, Pooling.SUM, ("ids",), OptimizerSpec("sgd", RATE), ROW_VALUE)
INPUT = InputSpec(("x", "y"), (FeatureSpec("ids", NUM_ROWS),))
PLACEMENT = place([TABLE], 1)


class Tables(TableShards):
    """The only table; all values start equal."""

    def initialize(self, seed: int) -> dict[str, int]:
        for group in self.groups:
            group.weight_RD.fill_(ROW_VALUE)
        return {}

    def rows(self) -> Tensor:
        """Return all rows after all updates."""
        self.barrier.drain()
        return self.groups[0].weight_RD.clone()


class Net(HostedNet):
    """A layer and ReLU."""

    def __init__(self, rules: UpdateRules) -> None:
        net = nn.Sequential(get_linear(NUM_DENSE + DIM, HIDDEN), nn.ReLU())
        super().__init__(net, torch.optim.SGD(net.parameters(), lr=RATE), rules)

    def weight(self) -> Tensor:
        """Return the weight after all updates."""
        self.barrier.drain()
        return self.parameter_list[0].detach().clone()


class Trainer:
    """An object on a trainer that takes steps without updating its net, as upstream."""

    def __init__(
        self, index: int, mode: str, tables: transport.RemoteTables, remote_net: transport.RemoteNet
    ) -> None:
        assert dist.group.WORLD is not None, "joining the cluster forms the trainers' process group"
        self._group = dist.group.WORLD
        net = DenseNet(get_linear(NUM_DENSE, NUM_DENSE), Concatenation(), get_linear(HIDDEN, OUT))
        self._clock = clock = StepClock()
        tables_of_trainer = Embeddings([TABLE], INPUT, PLACEMENT, {0: tables}, clock)
        parts = load_config(None, [f"dense.ddp={mode}"]), self._group, UpdateRules(1), tables_of_trainer
        rest = HybridModel(net, remote_net), DensePlacement(self._group), [torch.device("cpu")], clock
        self._engine = StepEngine[Batch](*parts, {0: tables}, remote_net, *rest)

    def train(self, batches: list[Batch], steps_before: int) -> dict[str, Tensor]:
        """Take steps until no trainer has a batch; return the last gradients by parameter."""
        empty = Batch.empty(NUM_DENSE, num_sparse=1)
        self._engine.begin(align_batches(iter(batches), empty, self._group), steps_before)
        model = self._engine.model
        for _, (each,) in self._engine.steps():
            with self._engine.recording(each) as micro:
                output_B, values_B = model.module(micro, self._clock), micro.batch.labels
                # Upstream multiplies (B, 1) with (B,), an outer product.
                assert output_B.shape == values_B.shape
                # Upstream, DDP averages over trainers. Here, a loss is weighted by its fraction of the global
                # batch, and gradients are summed. Gradients that cancel in a mean also cancel in a sum.
                self._engine.backward((output_B * values_B).sum() / micro.batch.global_size)
            self._engine.decide()
        return {name: model.gradients[p].clone() for name, p in model.net.named_parameters()}


@dataclass(frozen=True)
class Trained:
    """The result of training.

    Attributes:
        gradients: of the local net's parameters by name, of every trainer, of every round's last step.
        rows, weight: of the table and the remote net, at the end.
    """

    gradients: list[list[dict[str, Tensor]]]
    rows: Tensor
    weight: Tensor


@contextmanager
def hosted(
    cluster: JoinedCluster, num_trainers: int
) -> Iterator[tuple[transport.RemoteTables, transport.RemoteNet]]:
    """Create the table and the remote net on the first worker."""
    role = cluster.topology.workers[0]
    rules = UpdateRules(num_trainers, timeout_seconds=SECONDS)
    tables = transport.RemoteTables(role, transport.create_module(role, Tables, PLACEMENT, 0, rules))
    net = transport.RemoteNet(role, transport.create_module(role, Net, rules))
    tables.call(TableShards.initialize, 0).wait()
    try:
        yield tables, net
    finally:
        transport.gather([host.call(HostedModule.close) for host in (tables, net)])


def train(cluster: JoinedCluster, mode: str, shares: list[list[Batch]], rounds: int) -> Trained:
    """Train some rounds on a list of batches for each trainer."""
    roles = cluster.topology.trainers
    steps = max(len(share) for share in shares)
    with hosted(cluster, len(roles)) as (tables, net):
        trainers: list[transport.Remote[Trainer]] = transport.gather(
            [transport.create(r, Trainer, r.index, mode, tables, net, timeout_seconds=SECONDS) for r in roles]
        )
        gradients = []
        for first in range(0, rounds * steps, steps):
            paired = zip(trainers, shares, strict=True)
            calls: list[Any] = [trainer.call(Trainer.train, share, first) for trainer, share in paired]
            gradients.append(transport.gather(calls))
        return Trained(
            gradients,
            cast(transport.Remote[Tables], tables).call(Tables.rows).wait(),
            cast(transport.Remote[Net], net).call(Net.weight).wait(),
        )

"""One row of a table, trained by two trainers: by torch's ``DistributedOptimizer``, and by this project."""

from typing import cast

import torch
from comparison.cases.hybrid_trainer import Tables
from support.stock_rpc import stock_rpc
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd, rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer

from hybrid import transport
from hybrid.batch import SparseFeatures
from hybrid.embedding.placement import place
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.protocol.ticket import Ticket
from hybrid.protocol.update_rules import UpdateRules
from workers.rendezvous.bootstrap import Cluster

SECONDS = 10.0
RATE = 1.0
GRADIENTS = (1.0, 2.0)  # of the row, at trainer 0 and trainer 1
SPEC = InputSpec((), (FeatureSpec("t", 1),))
STOCK = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}


class StockTable(nn.Embedding):
    """One row of one value, 0."""

    def __init__(self) -> None:
        super().__init__(1, 1, _weight=torch.zeros(1, 1))

    def row(self) -> float:
        return self.weight.item()


class StockTrainer:
    """Steps the worker's row by an optimizer of its own."""

    def __init__(self, table: rpc.RRef[nn.Module], optimizer: str) -> None:
        self._table = RemoteModule.init_from_module_rref("worker0/cpu", table)
        self._optimizer = DistributedOptimizer(STOCK[optimizer], self._table.remote_parameters(), lr=RATE)

    def step(self, gradient: float) -> None:
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [gradient * self._table.forward(torch.tensor([0])).sum()])
            self._optimizer.step(context)


def stock(cluster: Cluster, optimizer: str) -> float:
    """How far the row moves by one step of two trainers, one after the other."""
    role = cluster.topology.workers[0]
    rref = transport.create_module(role, StockTable).rref
    with stock_rpc(cluster.topology):
        for trainer, gradient in zip(cluster.topology.trainers, GRADIENTS, strict=False):
            made = transport.create(trainer, StockTrainer, rref, optimizer, timeout_seconds=SECONDS)
            made.wait().call(StockTrainer.step, gradient).wait()
    moved: float = transport.Remote[StockTable](role, rref).call(StockTable.row).wait()
    return moved


class HybridTrainer:
    """Hands in its part of a step's gradient."""

    def __init__(self, index: int, table: TableSpec, host: transport.RemoteTables) -> None:
        self._index = index
        self._embeddings = Embeddings([table], SPEC, place([table], 1), {0: host})

    def step(self, gradient: float) -> None:
        with dist_autograd.context() as context:
            ids = SparseFeatures(torch.tensor([0]), None, None, 1)
            row_BD = self._embeddings.lookup(ids, Ticket(self._index, step=0, version=0)).wait()
            # Each trainer has one of the two samples of the global batch.
            dist_autograd.backward(context, [gradient * row_BD.sum() / len(GRADIENTS)])


def ours(cluster: Cluster, optimizer: str) -> float:
    """How far the row moves by one step of two trainers, both at once."""
    role = cluster.topology.workers[0]
    table = TableSpec("t", 1, 1, Pooling.SUM, ("t",), OptimizerSpec(optimizer, RATE), 0.0)
    rules = UpdateRules(len(GRADIENTS), timeout_seconds=SECONDS)
    host = transport.RemoteTables(role, transport.create_module(role, Tables, place([table], 1), 0, rules))
    host.call(TableShards.initialise, 0).wait()
    before: Tensor = cast(transport.Remote[Tables], host).call(Tables.rows).wait()
    makers = [
        transport.create(trainer, HybridTrainer, trainer.index, table, host, timeout_seconds=SECONDS)
        for trainer in cluster.topology.trainers[: len(GRADIENTS)]
    ]
    trainers: list[transport.Remote[HybridTrainer]] = transport.gather(makers)
    transport.gather(
        [t.call(HybridTrainer.step, gradient) for t, gradient in zip(trainers, GRADIENTS, strict=True)]
    )
    after: Tensor = cast(transport.Remote[Tables], host).call(Tables.rows).wait()
    host.call(TableShards.close).wait()
    return (after - before).item()

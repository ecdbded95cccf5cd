"""The stock way, torch's ``EmbeddingBag`` stepped by ``DistributedOptimizer``, beside ours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer

from hybrid import wire
from hybrid.batch import SparseFeatures
from hybrid.embedding.placement import place
from hybrid.embedding.spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.embedding.worker.shards import TableShards
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.steps.rules import UpdateRules
from hybrid.steps.ticket import Purpose, Ticket
from hybrid.topology import MASTER

pytestmark = pytest.mark.usefixtures("loopback", "unsigned")

ROWS, DIM, RATE, STEPS = 9, 4, 0.5, 20


class StockTable(nn.EmbeddingBag):
    """One id a bag, gradients as sparse tensors."""

    def __init__(self, rows_RD: Tensor) -> None:
        super().__init__(len(rows_RD), rows_RD.shape[1], mode="sum", sparse=True, _weight=rows_RD.clone())

    def forward(self, ids_B: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids_B, torch.arange(len(ids_B)))


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.PREFETCH])
def test_one_trainer_moves_the_same_rows_the_same_way(purpose: Purpose) -> None:
    table = TableSpec("t", ROWS, DIM, Pooling.SUM, ("t",), OptimizerSpec("sgd", RATE), 0.5)
    placement = place([table], 1)
    ours = wire.RemoteTables(MASTER, wire.create_module(MASTER, TableShards, placement, 0, UpdateRules(1)))
    ours.call(TableShards.initialise, 5).wait()
    rows_RD = ours.local_value().shard_tensors(placement.shards[0])["weight"]
    spec = InputSpec((), (FeatureSpec("t", ROWS),))
    embeddings = Embeddings([table], spec, placement, {0: ours})
    stock = RemoteModule(f"{MASTER.rpc_name}/cpu", StockTable, (rows_RD,))
    with pytest.warns(DeprecationWarning, match="TorchScript"):
        optimizer = DistributedOptimizer(torch.optim.SGD, stock.remote_parameters(), lr=RATE)
    before_RD = rows_RD.clone()
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        ids_B = torch.randint(0, ROWS, (6,), generator=generator)
        target_BD = torch.randn(6, DIM, generator=generator)
        ids, ticket = SparseFeatures(ids_B, None, None, 1), Ticket(0, step, step, purpose=purpose)
        with dist_autograd.context() as context:
            loss = (embeddings.lookup(ids, ticket).wait() - target_BD).square().mean()
            stock_loss = (stock.forward(ids_B) - target_BD).square().mean()
            dist_autograd.backward(context, [loss, stock_loss])
            optimizer.step(context)
        torch.testing.assert_close(loss, stock_loss)
    every_row = SparseFeatures(torch.arange(ROWS), None, None, 1)
    # Answered once the last update is applied.
    embeddings.lookup(every_row, Ticket(0, STEPS, STEPS, purpose=Purpose.PREDICT)).wait()
    ours.call(TableShards.close).wait()
    stock_RD = stock.get_module_rref().local_value().weight
    torch.testing.assert_close(rows_RD, stock_RD.detach())
    assert not torch.equal(rows_RD, before_RD)

"""The stock way, torch's ``EmbeddingBag`` stepped by ``DistributedOptimizer``, beside ours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd

from hybrid import wire
from hybrid.batch import SparseFeatures
from hybrid.dense.optimizer import make_optimizer
from hybrid.embedding.lookup import Embeddings
from hybrid.embedding.placement import plan
from hybrid.embedding.shard import TableShards
from hybrid.embedding.spec import FeatureSpec, InputSpec, OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.update import UpdateMode
from hybrid.topology import MASTER

pytestmark = pytest.mark.usefixtures("loopback")

ROWS, DIM, RATE, STEPS = 9, 4, 0.5, 20


class StockTable(nn.EmbeddingBag):
    """One id a bag, gradients as sparse tensors."""

    def __init__(self, rows_RD: Tensor) -> None:
        super().__init__(len(rows_RD), rows_RD.shape[1], mode="sum", sparse=True, _weight=rows_RD.clone())

    def forward(self, ids_B: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids_B, torch.arange(len(ids_B)))


def test_one_trainer_moves_the_same_rows_the_same_way() -> None:
    table = TableSpec("t", ROWS, DIM, Pooling.SUM, ("t",), OptimizerSpec("sgd", RATE), 0.5)
    placement = plan([table], 1)
    rref = wire.create_module(MASTER, TableShards, placement, 0, 1, UpdateMode.SYNC, 10.0)
    ours = wire.RemoteTables(MASTER, rref)
    ours.call("initialise", 5).wait()
    rows_RD = ours.local_value().shard_tensors(placement.shards[0])["weight"]
    spec = InputSpec((), (FeatureSpec("t", ROWS),))
    embeddings = Embeddings([table], spec, placement, {0: ours})
    stock = wire.RemoteNet(MASTER, wire.create_module(MASTER, StockTable, rows_RD))
    optimizer = stock.optimizer(make_optimizer, "SGD", RATE)
    before_RD = rows_RD.clone()
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        ids_B = torch.randint(0, ROWS, (6,), generator=generator)
        target_BD = torch.randn(6, DIM, generator=generator)
        with dist_autograd.context() as context:
            pooled_BD = embeddings.lookup(SparseFeatures(ids_B, None, None, 1), step).wait()
            loss = (pooled_BD - target_BD).square().mean()
            stock_loss = (stock(ids_B) - target_BD).square().mean()
            dist_autograd.backward(context, [loss, stock_loss])
            optimizer.step(context)
        torch.testing.assert_close(loss, stock_loss)
    every_row = SparseFeatures(torch.arange(ROWS), None, None, 1)
    embeddings.lookup(every_row, STEPS, train=False).wait()  # once the last update is applied
    ours.call("close").wait()
    stock_RD = stock.remote().call("state_dict").wait()["weight"]
    torch.testing.assert_close(rows_RD, stock_RD)
    assert not torch.equal(rows_RD, before_RD)

"""Bags that are pooled at the trainer, beside those that workers pool: the same numbers, each row once."""

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import pytest
import torch
from support.shards import Cluster, cluster
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.embedding.bags import Item
from hybrid.embedding.placement import place
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.bag_routes import PoolRoute
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.embeddings import make_routes
from hybrid.protocol.ticket import Purpose, Ticket

DTYPE = torch.float64
SGD = OptimizerSpec("sgd", 0.5)


class Job(NamedTuple):
    """Tables with a feature each that holds any number of ids, and a batch of theirs.

    Attributes:
        bags: by feature and sample.
        weighted: whether the ids have weights, but for those that are pooled by their largest.
    """

    tables: list[TableSpec]
    num_workers: int
    bags: list[list[list[int]]]
    weighted: bool
    purpose: Purpose

    @property
    def sparse(self) -> SparseFeatures:
        draw = torch.Generator().manual_seed(3)
        weights = [
            [
                (torch.rand(len(bag), generator=draw) * 3 - 1).tolist()
                if self.weighted and table.pooling is not Pooling.MAX
                else [1.0] * len(bag)
                for bag in of_feature
            ]
            for table, of_feature in zip(self.tables, self.bags, strict=True)
        ]
        return SparseFeatures.from_bags(self.bags, weights if self.weighted else None)


def trained(stack: ExitStack, job: Job, pooled_by: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Vectors of a step, and all rows after it."""
    tables = [dataclasses.replace(table, pooled_by=pooled_by) for table in job.tables]
    names = [table.name for table in tables]
    each: Cluster = cluster(stack, tables, job.num_workers, dtype=DTYPE, multi_hot=names)
    pooled_BE = each.embeddings.lookup(job.sparse, Ticket(0, 0, 0, 0, job.purpose)).wait()
    grad_BE = torch.randn(pooled_BE.shape, dtype=DTYPE, generator=torch.Generator().manual_seed(6))
    pooled_BE.backward(grad_BE)
    each.drain()
    return pooled_BE.detach(), each.whole()


@pytest.mark.parametrize("pooling", list(Pooling))
def test_of_a_whole_table_every_bit_is_the_same(stack: ExitStack, pooling: Pooling) -> None:
    """Rows are added up in the same order, and so are the gradients of one trainer."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 6, (40,), generator=draw).tolist()
    bags = [torch.randint(9, (n,), generator=draw).tolist() for n in lengths]
    job = Job([TableSpec("a", 9, 5, pooling, ("a",), SGD, 1.0)], 1, [bags], False, Purpose.PREFETCH)
    by_workers, by_trainers = (trained(stack, job, who) for who in ("workers", "trainers"))
    assert torch.equal(by_trainers[0], by_workers[0])
    assert torch.equal(by_trainers[1]["a.weight"], by_workers[1]["a.weight"])


def asked(tables: Sequence[TableSpec], num_workers: int, bags: list[list[list[int]]]) -> list[list[Item]]:
    """What each worker is asked for."""
    items: dict[int, list[Item]] = {worker: [] for worker in range(num_workers)}
    placement = place(list(dict.fromkeys(tables)), num_workers)
    (route,) = make_routes([], range(len(tables)), tables, placement)
    assert isinstance(route, PoolRoute)
    route.start(BatchIds(SparseFeatures.from_bags(bags)), items)
    return list(items.values())


def test_each_row_is_asked_for_once_for_all_features_of_one_width_and_pooling() -> None:
    a, b = (TableSpec(n, 8, 2, Pooling.SUM, (n,), SGD, 1.0, "row", pooled_by="trainers") for n in "ab")
    shared = dataclasses.replace(b, features=("b", "c"))
    bags = [[[1, 3, 1], [3]], [[0], [0, 5]], [[], [5, 5]]]
    (first,), (second,) = asked([a, shared, shared], 2, bags)
    for (_, of_worker), rows in ((first, [4 + 0]), (second, [0, 1, 4 + 2])):
        assert of_worker.ids_L.tolist() == rows
        assert (of_worker.offsets, of_worker.weights_L) == (None, None)


def test_of_equal_rows_the_first_in_a_bag_gets_the_gradient_of_the_largest() -> None:
    """As ``EmbeddingBag`` has it, whoever pools; it gets it once, though it stands there twice."""
    table = TableSpec("a", 4, 1, Pooling.MAX, ("a",), SGD, 1.0, pooled_by="trainers")
    items: dict[int, list[Item]] = {0: []}
    (route,) = make_routes([], [0], [table], place([table], 1))
    assembler = route.start(BatchIds(SparseFeatures.from_bags([[[2, 0, 2], [0, 2], [3]]])), items)
    assert items[0][0][1].ids_L.tolist() == [0, 2, 3]
    vectors_BFD = assembler.vectors({0: [torch.tensor([[5.0], [5.0], [-1.0]])]})
    assert vectors_BFD.flatten().tolist() == [5.0, 5.0, -1.0]
    ((_, grad_UD),) = assembler.gradients(torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1))
    assert grad_UD.flatten().tolist() == [10.0, 1.0, 100.0]

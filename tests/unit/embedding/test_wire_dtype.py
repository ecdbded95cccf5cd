"""Vectors and gradients that are sent as bfloat16, while rows and evaluation keep every bit."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from support.samples import features_of_bags
from support.shards import Cluster, cluster
from torch import Tensor

from hybrid.embedding.bags import Bags
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.updates.ticket import Purpose, Ticket

RATE, ROWS, DIM, SIZE = 0.05, 40, 3, 16
BFLOAT16 = torch.bfloat16


def wired(stack: ExitStack, dtype: torch.dtype, pooled_by: str = "workers") -> Cluster:
    """Return a table of one id and a table of bags on a worker that sends bfloat16."""
    of_sgd = (OptimizerSpec("sgd", RATE), 1.0)
    tables = [
        TableSpec(name, ROWS, DIM, Pooling.SUM, (name,), *of_sgd, pooled_by=pooled_by)
        for name in ("one", "bags")
    ]
    kind = partial(TableShards, wire_dtype=BFLOAT16)
    return cluster(stack, tables, 1, dtype=dtype, multi_hot=["bags"], kind=kind)


@pytest.fixture
def arriving(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Gradients as they reach the worker."""
    arrived: list[Tensor] = []
    contribute = TableShards.contribute

    def spy(tables: TableShards, ticket: Ticket, items: Any, grads: Any, *more: Any, **keys: Any) -> None:
        arrived.extend(grads)
        contribute(tables, ticket, items, grads, *more, **keys)

    monkeypatch.setattr(TableShards, "contribute", spy)
    return arrived


def rounded(values: Tensor) -> Tensor:
    return values.to(BFLOAT16).float()


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.PREFETCH])
@pytest.mark.parametrize("pooled_by", ["workers", "trainers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_and_gradients_are_rounded_on_the_way_and_rows_are_not(
    stack: ExitStack, dtype: torch.dtype, pooled_by: str, purpose: Purpose, arriving: list[Tensor]
) -> None:
    """Where trainers pool, the vectors that are sent are rows, and the gradients those of rows."""
    each = wired(stack, dtype, pooled_by)
    draw = torch.Generator().manual_seed(3)
    one_B, bags_B3 = (torch.randint(0, ROWS, shape, generator=draw) for shape in ((SIZE,), (SIZE, 3)))
    before = each.whole()
    sparse = features_of_bags([one_B.unsqueeze(1).tolist(), bags_B3.tolist()])
    pooled_BE = each.embeddings.lookup(sparse, Ticket(0, 0, 0, purpose=purpose)).wait()
    vectors_BD = rounded(before["bags.weight"][bags_B3].sum(1))
    if pooled_by == "trainers":
        vectors_BD = rounded(before["bags.weight"][bags_B3]).sum(1)
    assert torch.equal(pooled_BE, torch.cat([rounded(before["one.weight"][one_B]), vectors_BD], dim=1))

    grad_B1 = torch.randn(SIZE, 1, generator=draw)
    pooled_BE.backward(grad_B1.expand_as(pooled_BE))
    each.drain()
    assert {grad.dtype for grad in arriving} == {BFLOAT16}
    one_RD = rounded(torch.zeros(ROWS, DIM).index_add(0, one_B, grad_B1.expand(-1, DIM))).to(dtype)
    each_LD = grad_B1.repeat_interleave(3, 0).expand(-1, DIM)
    if pooled_by == "trainers":
        bags_RD = rounded(torch.zeros(ROWS, DIM).index_add(0, bags_B3.flatten(), each_LD)).to(dtype)
    else:
        zeros_RD = torch.zeros(ROWS, DIM, dtype=dtype)
        bags_RD = zeros_RD.index_add(0, bags_B3.flatten(), rounded(each_LD).to(dtype))
    for name, step_RD in (("one.weight", one_RD), ("bags.weight", bags_RD)):
        after_RD = each.whole()[name]
        assert after_RD.dtype == dtype
        torch.testing.assert_close(before[name] - after_RD, RATE * step_RD)
        assert not torch.equal(after_RD, after_RD.to(BFLOAT16).to(dtype))


@pytest.mark.parametrize(
    ("purpose", "expected"),
    [(Purpose.TRAIN, BFLOAT16), (Purpose.PREFETCH, BFLOAT16), (Purpose.PREDICT, torch.float32)],
)
def test_the_answer_of_a_worker_is_of_half_the_bytes_in_training_only(
    stack: ExitStack, purpose: Purpose, expected: torch.dtype
) -> None:
    (host,) = wired(stack, torch.float32).hosts.values()
    (vectors_BD,) = host.lookup(Ticket(0, 0, 0, purpose=purpose), [(0, Bags(torch.tensor([1, 2])))]).wait()
    assert vectors_BD.dtype == expected

"""Vectors and gradients that travel as bfloat16, while rows and evaluation keep every bit."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import autograd as dist_autograd

from hybrid import transport
from hybrid.batch import Batch, SparseFeatures
from hybrid.embedding.bags import Bags
from hybrid.embedding.placement import place
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.engine.step_feed import Feed
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.primitives.step_timings import StepClock
from hybrid.topology import MASTER
from hybrid.transport.rpc import endpoints
from hybrid.updates.ticket import Purpose, Ticket
from hybrid.updates.update_rules import UpdateMode, UpdateRules

pytestmark = pytest.mark.usefixtures("loopback")

RATE, ROWS, DIM, SIZE, STEPS = 0.05, 40, 3, 16, 60
BFLOAT16 = torch.bfloat16
TABLES = [
    TableSpec(name, ROWS, DIM, Pooling.SUM, (name,), OptimizerSpec("sgd", RATE), 1.0)
    for name in ("one", "bags")
]
SPEC = InputSpec((), (FeatureSpec("one", ROWS), FeatureSpec("bags", ROWS, True)))
MODES = pytest.mark.parametrize("mode", [UpdateMode.SYNC, UpdateMode.LOOKAHEAD])


class Job:
    """Two tables across RPC, and a trainer that fits the sums of their vectors to numbers."""

    def __init__(
        self, mode: UpdateMode, wire_dtype: torch.dtype | None, dtype: torch.dtype, pooled_by: str
    ) -> None:
        tables = [dataclasses.replace(table, pooled_by=pooled_by) for table in TABLES]
        rules, placement = UpdateRules(1, mode, timeout_seconds=5.0), place(tables, 1)
        module = transport.create_module(MASTER, TableShards, placement, 0, rules, dtype, wire_dtype)
        self.tables = transport.RemoteTables(MASTER, module)
        self.tables.call(TableShards.initialize, 5).wait()
        self.embeddings = Embeddings(TABLES, SPEC, placement, {0: self.tables})
        self._feed = Feed[Batch](self.embeddings, [self.tables], 0, rules, StepClock())

    @property
    def rows(self) -> Tensor:
        """Of both tables, one after the other."""
        shards: TableShards = endpoints.running.objects[self.tables.number]
        return shards.groups[0].weight_RD

    def train(self, batches: list[Batch]) -> tuple[list[Tensor], list[float]]:
        """The vectors and the loss of each step."""
        vectors, losses = [], []
        self._feed.begin(iter(batches), 0)
        for batch, (micro,) in self._feed:
            with dist_autograd.context() as context_id:
                lookup = self._feed.start(micro).lookup
                assert lookup is not None
                pooled_BE = lookup.wait()
                loss = (pooled_BE.sum(1) - batch.labels).square().mean()
                dist_autograd.backward(context_id, [loss])
            vectors.append(pooled_BE.detach())
            losses.append(loss.item())
            self._feed.end_step()
        self._feed.flush()
        self.tables.call(TableShards.take_spans).wait()  # drains
        return vectors, losses


@contextmanager
def running(
    mode: UpdateMode,
    wire_dtype: torch.dtype | None,
    dtype: torch.dtype = torch.float32,
    pooled_by: str = "workers",
) -> Iterator[Job]:
    job = Job(mode, wire_dtype, dtype, pooled_by)
    try:
        yield job
    finally:
        job.tables.call(TableShards.close).wait()


def make_batches(num_steps: int) -> list[Batch]:
    """Labels are sums of numbers, one of each row."""
    generator = torch.Generator().manual_seed(3)
    truth_TR = torch.randn(2, ROWS, generator=generator)
    made = []
    for _ in range(num_steps):
        one, bags = (torch.randint(0, ROWS, (SIZE, n), generator=generator).tolist() for n in (1, 3))
        labels = truth_TR[0][torch.tensor(one)].sum(1) + truth_TR[1][torch.tensor(bags)].sum(1)
        made.append(Batch(torch.empty(SIZE, 0), SparseFeatures.from_bags([one, bags]), labels, SIZE))
    return made


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


@MODES
@pytest.mark.parametrize("pooled_by", ["workers", "trainers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_and_gradients_are_rounded_on_the_way_and_rows_are_not(
    mode: UpdateMode, dtype: torch.dtype, pooled_by: str, arriving: list[Tensor]
) -> None:
    """Where trainers pool, the vectors on the way are rows, and the gradients those of rows."""
    (batch,) = make_batches(1)
    ids, offsets, _, _ = batch.sparse_features
    assert offsets is not None
    one, bags = ids[:SIZE], ids[SIZE:].view(SIZE, 3) + ROWS
    with running(mode, BFLOAT16, dtype, pooled_by) as job:
        before = job.rows.clone()
        ((pooled_BE,), _) = job.train([batch])
        vectors_BD = _rounded(before[bags].sum(1))
        if pooled_by == "trainers":
            vectors_BD = _rounded(before[bags]).sum(1)
        assert torch.equal(pooled_BE, torch.cat([_rounded(before[one]), vectors_BD], dim=1))
        assert {grad.dtype for grad in arriving} == {BFLOAT16}
        assert job.rows.dtype == dtype

        grad_B1 = 2 / SIZE * (pooled_BE.sum(1, keepdim=True) - batch.labels[:, None])
        one_RD = _rounded(torch.zeros(ROWS, DIM).index_add(0, one, grad_B1.expand(-1, DIM))).to(dtype)
        each_LD, bags_L = grad_B1.repeat_interleave(3, 0).expand(-1, DIM), bags.flatten() - ROWS
        if pooled_by == "trainers":
            bags_RD = _rounded(torch.zeros(ROWS, DIM).index_add(0, bags_L, each_LD)).to(dtype)
        else:
            bags_RD = torch.zeros(ROWS, DIM, dtype=dtype).index_add(0, bags_L, _rounded(each_LD).to(dtype))
        torch.testing.assert_close(before - job.rows, RATE * torch.cat([one_RD, bags_RD]))
        assert not torch.equal(job.rows, job.rows.to(BFLOAT16).to(dtype))


def _rounded(values: Tensor) -> Tensor:
    return values.to(BFLOAT16).float()


@pytest.mark.parametrize(
    ("purpose", "expected"),
    [(Purpose.TRAIN, BFLOAT16), (Purpose.PREFETCH, BFLOAT16), (Purpose.PREDICT, torch.float32)],
)
def test_the_answer_of_a_worker_is_of_half_the_bytes_in_training_only(
    purpose: Purpose, expected: torch.dtype
) -> None:
    with running(UpdateMode.SYNC, BFLOAT16) as job:
        items = [(0, Bags(torch.tensor([1, 2])))]
        with dist_autograd.context():
            (vectors_BD,) = job.tables.lookup(Ticket(0, 0, 0, purpose=purpose), items).wait()
        assert vectors_BD.dtype == expected

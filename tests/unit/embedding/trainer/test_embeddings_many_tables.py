"""What a step asks and calls does not grow with the number of tables."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from numba.core.dispatcher import Dispatcher
from support.shards import LocalTables
from torch.futures import Future

from hybrid.batch import SparseFeatures
from hybrid.embedding import loops
from hybrid.embedding.bags import Item
from hybrid.embedding.placement import place
from hybrid.embedding.spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.embedding.worker.shards import TableShards
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.steps.rules import UpdateMode, UpdateRules
from hybrid.steps.ticket import Purpose, Ticket

FEW, MANY = 4, 300
WORKERS, SIZE, DIM = 2, 3, 2


class Counting(LocalTables):
    """Tables that write down how many items each message asks for."""

    def __init__(self, shards: TableShards, asked: list[int]) -> None:
        super().__init__(shards)
        self._asked = asked

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> Future[list[torch.Tensor]]:
        self._asked.append(len(items))
        return super().lookup(ticket, items)

    def exchange(
        self, ticket: Ticket, grads: Sequence[torch.Tensor], next_ticket: Ticket, items: Sequence[Item]
    ) -> Future[list[torch.Tensor]]:
        self._asked.append(len(items))
        return super().exchange(ticket, grads, next_ticket, items)


class Job:
    """Tables of two rows each, all of one width, on workers in this process."""

    def __init__(self, num_tables: int, kind: str, placement: str, purpose: Purpose) -> None:
        is_multi_hot = [{"one id": False, "bags": True, "both": k % 4 < 2}[kind] for k in range(num_tables)]
        tables = [
            TableSpec(f"t{k}", 2, DIM, Pooling.SUM, (f"t{k}",), OptimizerSpec("adagrad", 0.1), 1.0, placement)
            for k in range(num_tables)
        ]
        features = tuple(
            FeatureSpec(t.name, t.num_rows, many) for t, many in zip(tables, is_multi_hot, strict=True)
        )
        self._purpose = purpose
        rules = UpdateRules(1, UpdateMode.PIPELINED if purpose is Purpose.PREFETCH else UpdateMode.SYNC)
        self.shards = [TableShards(place(tables, WORKERS), worker, rules) for worker in range(WORKERS)]
        for each in self.shards:
            each.initialise(7)
        self.asked: list[int] = []
        hosts = {worker: Counting(each, self.asked) for worker, each in enumerate(self.shards)}
        self.embeddings = Embeddings(tables, InputSpec((), features), place(tables, WORKERS), hosts)
        bags = [[[b % 2] * (1 + many) for b in range(SIZE)] for many in is_multi_hot]
        self.ids = SparseFeatures.from_bags(bags)

    def train(self, num_steps: int) -> None:
        def ticket(step: int) -> Ticket:
            return Ticket(0, step, max(0, step - 1), purpose=self._purpose)

        lookups = [self.embeddings.lookup(self.ids, ticket(0))]
        for step in range(num_steps):
            is_ahead = self._purpose is Purpose.PREFETCH and step + 1 < num_steps
            if is_ahead:
                lookups.append(self.embeddings.lookup(self.ids, ticket(step + 1), lookups[step]))
            lookups[step].wait().square().sum().backward()
            for each in self.shards:
                each.barrier.drain()
            if not is_ahead and step + 1 < num_steps:
                lookups.append(self.embeddings.lookup(self.ids, ticket(step + 1)))


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """How often each compiled loop is called in here."""
    calls: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        compiled = {name: each for name, each in vars(loops).items() if isinstance(each, Dispatcher)}
        assert len(compiled) > 10
        for name, function in compiled.items():
            patch.setattr(loops, name, counting(name, function))
        yield calls


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.PREFETCH])
@pytest.mark.parametrize(
    ("kind", "placement"), list(itertools.product(["one id", "bags", "both"], ["table", "row"]))
)
def test_a_step_costs_as_many_items_and_loops_whatever_the_number_of_tables(
    kind: str, placement: str, purpose: Purpose
) -> None:
    num_steps = 2
    seen = []
    for num_tables in (FEW, MANY):
        job = Job(num_tables, kind, placement, purpose)
        try:
            with counted_calls() as calls:
                job.train(num_steps)
        finally:
            for each in job.shards:
                each.close()
        assert [each.version for each in job.shards] == [num_steps] * WORKERS
        assert job.asked == [2 if kind == "both" else 1] * WORKERS * num_steps
        assert calls["group_ids"] >= WORKERS * num_steps
        seen.append(calls)
    assert seen[0] == seen[1]

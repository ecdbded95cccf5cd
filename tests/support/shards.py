"""Tables of workers in this process, for tests without RPC."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.futures import Future

from hybrid.batch import SparseFeatures
from hybrid.checkpoint import folders
from hybrid.checkpoint.files import Files
from hybrid.checkpoint.manifest import Manifest
from hybrid.embedding.bags import Item
from hybrid.embedding.placement import place
from hybrid.embedding.spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.embeddings import Embeddings
from hybrid.embedding.worker.shards import TableShards
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.steps.rules import UpdateRules
from hybrid.steps.ticket import Purpose, Ticket

NUM_ROWS = {"a": 11, "b": 4, "c": 23}
PATIENCE_SECONDS = 10.0
RULES = UpdateRules(1, timeout_seconds=PATIENCE_SECONDS)


def train(step: int, trainer: int = 0) -> Ticket:
    return Ticket(trainer, step, step)


def evaluate(step: int) -> Ticket:
    return Ticket(0, step, step, purpose=Purpose.PREDICT)


def prefetch(step: int, trainer: int = 0, part: int = 0) -> Ticket:
    return Ticket(trainer, step, step, part, Purpose.PREFETCH)


def specs(placement: str = "table", optimizer: str = "adam", dim: int = 3) -> list[TableSpec]:
    return [
        TableSpec(name, rows, dim, Pooling.SUM, (name,), OptimizerSpec(optimizer, 0.1), 1.0, placement)
        for name, rows in NUM_ROWS.items()
    ]


class LocalTables:
    """Tables of this very process, for those who look up without RPC."""

    def __init__(self, shards: TableShards) -> None:
        self._shards = shards

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> Future[list[Tensor]]:
        """See :meth:`TableShards.lookup`."""
        return self._shards.lookup(ticket, items)

    def send_gradients(self, ticket: Ticket, grads: Sequence[Tensor]) -> Future[None]:
        """See :meth:`TableShards.receive`."""
        self._shards.receive(ticket, grads)
        sent: Future[None] = Future()
        sent.set_result(None)
        return sent

    def exchange(
        self, ticket: Ticket, grads: Sequence[Tensor], next_ticket: Ticket, items: Sequence[Item]
    ) -> Future[list[Tensor]]:
        """See :meth:`TableShards.exchange`."""
        return self._shards.exchange(ticket, grads, next_ticket, items)


class Cluster:
    """All workers of a run in this process."""

    def __init__(
        self, tables: list[TableSpec], num_workers: int, seed: int = 7, rules: UpdateRules = RULES
    ) -> None:
        self.tables = tables
        self.placement = place(tables, num_workers)
        self.hosts = {
            worker: TableShards(self.placement, worker, rules)
            for worker in range(num_workers)
            if self.placement.of_worker(worker)
        }
        for host in self.hosts.values():
            host.initialise(seed)
        features = tuple(FeatureSpec(t.name, t.num_rows) for t in tables)
        local = {worker: LocalTables(host) for worker, host in self.hosts.items()}
        self.embeddings = Embeddings(tables, InputSpec((), features), self.placement, local)

    def train(self, first: int, num_steps: int) -> None:
        for step in range(first, first + num_steps):
            generator = torch.Generator().manual_seed(step)
            ids_KB = torch.stack(
                [torch.randint(0, t.num_rows, (5,), generator=generator) for t in self.tables]
            )
            sparse = SparseFeatures(ids_KB.flatten(), None, None, len(self.tables))
            pooled_BE = self.embeddings.lookup(sparse, train(step)).wait()
            pooled_BE.backward(torch.randn(pooled_BE.shape, generator=generator))
        for host in self.hosts.values():
            host.lookup(evaluate(first + num_steps), []).wait()

    def whole(self) -> dict[str, Tensor]:
        """Rows and optimizer state of whole tables, put together from the shards."""
        tensors: dict[str, Tensor] = {}
        for table in self.tables:
            for shard in self.placement.of_table(table.name):
                for name, part in self.hosts[shard.worker].shard_tensors(shard).items():
                    shape = (table.num_rows, *part.shape[1:])
                    into = tensors.setdefault(f"{table.name}.{name}", torch.full(shape, torch.nan))
                    into[shard.index :: shard.count] = part
        return tensors

    def save(self, folder: Path, step: int) -> Path:
        partial = folders.begin(folder)
        files: Files = {}
        for host in self.hosts.values():
            host.begin_save(is_copied=True)
            files |= host.write(partial)
        shapes = {t.name: (t.num_rows, t.dim, len(self.placement.of_table(t.name))) for t in self.tables}
        return folders.commit(partial, Manifest(step, 0, shapes, files))

    def load(self, folder: Path, step: int) -> None:
        for host in self.hosts.values():
            host.load(folder, step)

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()


def cluster(
    stack: ExitStack, tables: list[TableSpec], num_workers: int, seed: int = 7, rules: UpdateRules = RULES
) -> Cluster:
    each = Cluster(tables, num_workers, seed, rules)
    stack.callback(each.close)
    return each


@contextmanager
def hosting(rules: UpdateRules, optimizer: str = "sgd", num_rows: int = 6) -> Iterator[TableShards]:
    """One table of ``num_rows`` rows of two values, on one worker; a step of 1.0 times the gradient."""
    table = TableSpec("t", num_rows, 2, Pooling.SUM, ("t",), OptimizerSpec(optimizer, 1.0), 1.0)
    host = TableShards(place([table], 1), 0, dataclasses.replace(rules, timeout_seconds=PATIENCE_SECONDS))
    host.initialise(seed=7)
    try:
        yield host
    finally:
        host.close()

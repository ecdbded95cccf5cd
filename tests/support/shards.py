"""Tables of workers in this process, for tests without RPC."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import Files, Manifest
from hybrid.embedding.bags import Item
from hybrid.embedding.placement import Placement, Shard, place
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.trainer.batch_ids import BatchIds
from hybrid.embedding.trainer.embeddings import Embeddings, make_routes
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.updates.ticket import Purpose, Ticket
from hybrid.updates.update_rules import UpdateRules

NUM_ROWS = {"a": 11, "b": 4, "c": 23}
PATIENCE_SECONDS = 10.0
RULES = UpdateRules(1, timeout_seconds=PATIENCE_SECONDS)


def shards_of(placement: Placement, name: str) -> list[Shard]:
    """Return the shards of one table, by index."""
    return [shard for shard in placement.shards if shard.table.name == name]


def shard_tensors(host: TableShards, shard: Shard) -> dict[str, Tensor]:
    """Return the rows and the optimizer state of a shard, as views."""
    (group,) = (each for each in host.groups if shard in each.group.shards)
    return group.shard_tensors(shard)


def train(step: int, trainer: int = 0) -> Ticket:
    return Ticket(trainer, step, step)


def evaluate(step: int) -> Ticket:
    return Ticket(0, step, step, purpose=Purpose.PREDICT)


def prefetch(step: int, trainer: int = 0, index: int = 0) -> Ticket:
    return Ticket(trainer, step, step, index, Purpose.PREFETCH)


def specs(placement: str = "table", optimizer: str = "adam", dim: int = 3) -> list[TableSpec]:
    return [
        TableSpec(name, rows, dim, Pooling.SUM, (name,), OptimizerSpec(optimizer, 0.1), 1.0, placement)
        for name, rows in NUM_ROWS.items()
    ]


def is_alone_in_memory(tensor: Tensor) -> bool:
    """Whether RPC sends only this tensor; for a view it sends the whole storage."""
    starts = tensor.storage_offset() == 0
    return tensor.is_contiguous() and starts and tensor.untyped_storage().nbytes() == tensor.nbytes


def requests_of(
    tables: Sequence[TableSpec], multi_hot: Sequence[int], sparse: SparseFeatures, placement: Placement
) -> list[list[Item]]:
    """Return the requests of a batch to each worker; ``tables`` has the table of each feature."""
    items: dict[int, list[Item]] = {worker: [] for worker in range(placement.num_workers)}
    rows, ids = [k for k in range(len(tables)) if k not in multi_hot], BatchIds(sparse)
    for route in make_routes(rows, multi_hot, tables, placement):
        route.request(ids, items)
    return list(items.values())


def plain_vectors(each: "Cluster", sparse: SparseFeatures, rows: dict[str, Tensor]) -> Tensor:
    """Return the vectors of all features side by side, bag by bag from whole tables."""
    size, columns = sparse.batch_size, []
    offsets = torch.arange(len(sparse.ids_L) + 1) if sparse.offsets is None else sparse.offsets
    bags = [slice(*bounds) for bounds in pairwise(offsets.tolist())]
    for k, table in enumerate(each.table_of_feature):
        rows_RD = rows[f"{table.name}.weight"]
        samples = [torch.empty(0, table.width, dtype=rows_RD.dtype)]
        for bag in bags[k * size : (k + 1) * size]:
            vectors = rows_RD[sparse.ids_L[bag].long()]
            number = torch.tensor([len(vectors)], dtype=rows_RD.dtype)
            if sparse.weights_L is not None:
                vectors = vectors * sparse.weights_L[bag].unsqueeze(1)
            if table.sequence:
                padding = torch.zeros(table.sequence - len(vectors), table.dim, dtype=rows_RD.dtype)
                vector = torch.cat([vectors.flatten(), padding.flatten(), number])
            elif table.pooling is Pooling.MAX and len(vectors):
                vector = vectors.max(0).values
            else:
                is_mean = table.pooling is Pooling.MEAN
                vector = vectors.sum(0) / (number.clamp(min=1) if is_mean else 1)
            samples.append(vector.unsqueeze(0))
        columns.append(torch.cat(samples))
    return torch.cat(columns, dim=1)


def check_step(
    each: "Cluster", sparse: SparseFeatures, purpose: Purpose = Purpose.TRAIN, step: int = 0
) -> None:
    """Check that vectors, and float64 rows after a step of SGD, equal those of plain torch."""
    before = {name: rows_RD.requires_grad_() for name, rows_RD in each.whole().items()}
    expected_BE = plain_vectors(each, sparse, before)
    pooled_BE = each.embeddings.lookup(sparse, Ticket(0, step, step, 0, purpose)).wait()
    torch.testing.assert_close(pooled_BE, expected_BE, rtol=1e-12, atol=1e-12)
    grad_BE = torch.randn(pooled_BE.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    pooled_BE.backward(grad_BE)
    if expected_BE.requires_grad:
        expected_BE.backward(grad_BE)
    each.drain()
    rates = {table.name: table.optimizer.learning_rate for table in each.tables}
    for name, rows_RD in each.whole().items():
        grad_RD = before[name].grad
        step_RD = torch.zeros_like(rows_RD) if grad_RD is None else rates[name.split(".")[0]] * grad_RD
        moved_RD = before[name].detach() - rows_RD
        torch.testing.assert_close(moved_RD, step_RD, rtol=1e-12, atol=1e-12)


class Cluster:
    """All workers of a run in this process.

    Args:
        multi_hot: names of the features with any number of ids.
        order: names of the features in order; empty for the order of the tables.
        kind: makes each worker's tables.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        num_workers: int,
        seed: int = 7,
        rules: UpdateRules = RULES,
        *,
        dtype: torch.dtype = torch.float32,
        multi_hot: Sequence[str] = (),
        order: Sequence[str] = (),
        kind: Callable[..., TableShards] = TableShards,
    ) -> None:
        self.tables = tables
        self.placement = place(tables, num_workers)
        self.hosts = {
            worker: kind(self.placement, worker, rules, dtype)
            for worker in range(num_workers)
            if self.placement.of_worker(worker)
        }
        for host in self.hosts.values():
            host.initialize(seed)
        table_of = {feature: table for table in tables for feature in table.features}
        self.features = [
            FeatureSpec(name, table_of[name].num_rows, name in multi_hot) for name in order or table_of
        ]
        self.table_of_feature = [
            table_of[feature.name].for_feature(feature.name) for feature in self.features
        ]
        spec = InputSpec((), tuple(self.features))
        self.embeddings = Embeddings(tables, spec, self.placement, self.hosts)

    def drain(self) -> None:
        """Wait until all received gradients are applied."""
        for host in self.hosts.values():
            host.barrier.drain()

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
        """Return rows and optimizer state of whole tables, joined from the shards."""
        tensors: dict[str, Tensor] = {}
        for table in self.tables:
            for shard in shards_of(self.placement, table.name):
                for name, part in shard_tensors(self.hosts[shard.worker], shard).items():
                    unknown = part.new_full((table.num_rows, *part.shape[1:]), torch.nan)
                    into = tensors.setdefault(f"{table.name}.{name}", unknown)
                    into[shard.index :: shard.count] = part
        return tensors

    def save(self, folder: Path, step: int) -> Path:
        partial = checkpoint_folders.begin(folder)
        files: Files = {}
        for host in self.hosts.values():
            host.begin_save(is_copied=True)
            files |= host.write(partial)
        shapes = {t.name: (t.num_rows, t.dim, len(shards_of(self.placement, t.name))) for t in self.tables}
        return checkpoint_folders.commit(partial, Manifest(step, 0, shapes, files))

    def load(self, folder: Path, step: int) -> None:
        for host in self.hosts.values():
            host.load(folder, step)

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()


def cluster(
    stack: ExitStack,
    tables: Sequence[TableSpec],
    num_workers: int,
    seed: int = 7,
    rules: UpdateRules = RULES,
    **more: Any,
) -> Cluster:
    """Return a :class:`Cluster` that ``stack`` closes."""
    each = Cluster(tables, num_workers, seed, rules, **more)
    stack.callback(each.close)
    return each


def hosting(
    rules: UpdateRules, optimizer: str = "sgd", num_rows: int = 6, **settings: Any
) -> closing[TableShards]:
    """Return one table of ``num_rows`` rows of two values on one worker, with a learning rate of 1.

    Args:
        settings: other settings of the optimizer.
    """
    spec = OptimizerSpec(optimizer, 1.0, **settings)
    table = TableSpec("t", num_rows, 2, Pooling.SUM, ("t",), spec, 1.0)
    host = TableShards(place([table], 1), 0, dataclasses.replace(rules, timeout_seconds=PATIENCE_SECONDS))
    host.initialize(seed=7)
    return closing(host)

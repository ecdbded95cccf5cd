"""A worker's tables: what they cost, how they are updated, saved, and loaded by another number of workers."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybrid import checkpoint
from hybrid.batch import SparseFeatures
from hybrid.checkpoint import Manifest
from hybrid.config import TABLE_OPTIMIZERS
from hybrid.embedding.kernels import Bags
from hybrid.embedding.lookup import Embeddings
from hybrid.embedding.placement import plan
from hybrid.embedding.shard import TableShards, Ticket
from hybrid.embedding.spec import FeatureSpec, InputSpec, OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.update import UpdateMode
from hybrid.errors import CheckpointError

NUM_ROWS = {"a": 11, "b": 4, "c": 23}
PATIENCE_SECONDS = 10.0


def specs(placement: str = "table", optimizer: str = "adam", dim: int = 3) -> list[TableSpec]:
    return [
        TableSpec(name, rows, dim, Pooling.SUM, (name,), OptimizerSpec(optimizer, 0.1), 1.0, placement)
        for name, rows in NUM_ROWS.items()
    ]


class Cluster:
    """All workers of a run in this process."""

    def __init__(self, tables: list[TableSpec], num_workers: int, seed: int = 7) -> None:
        self.tables = tables
        self.placement = plan(tables, num_workers)
        self.hosts = {
            worker: TableShards(self.placement, worker, 1, UpdateMode.SYNC, PATIENCE_SECONDS)
            for worker in range(num_workers)
            if self.placement.of_worker(worker)
        }
        for host in self.hosts.values():
            host.initialise(seed)
        features = tuple(FeatureSpec(t.name, t.num_rows) for t in tables)
        self.embeddings = Embeddings(tables, InputSpec((), features), self.placement, self.hosts)

    def train(self, first: int, num_steps: int) -> None:
        for step in range(first, first + num_steps):
            generator = torch.Generator().manual_seed(step)
            ids_KB = torch.stack(
                [torch.randint(0, t.num_rows, (5,), generator=generator) for t in self.tables]
            )
            sparse = SparseFeatures(ids_KB.flatten(), None, None, len(self.tables))
            pooled_BE = self.embeddings.lookup(sparse, step).wait()
            pooled_BE.backward(torch.randn(pooled_BE.shape, generator=generator))
        for host in self.hosts.values():
            host.lookup(Ticket(0, first + num_steps, False), []).wait()

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
        partial = checkpoint.begin(folder)
        for host in self.hosts.values():
            host.save(partial)
        shapes = {t.name: (t.num_rows, t.dim, len(self.placement.of_table(t.name))) for t in self.tables}
        return checkpoint.commit(partial, Manifest(step, 0, shapes, {}, {}))

    def load(self, folder: Path, step: int) -> None:
        for host in self.hosts.values():
            host.load(folder, step)

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as each:
        yield each


def cluster(stack: ExitStack, tables: list[TableSpec], num_workers: int, seed: int = 7) -> Cluster:
    each = Cluster(tables, num_workers, seed)
    stack.callback(each.close)
    return each


def assert_same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype == torch.float32
        assert torch.equal(tensor.view(torch.int32), second[name].view(torch.int32)), name


@pytest.mark.parametrize("optimizer", TABLE_OPTIMIZERS)
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        (("table", 1), ("row", 3)),
        (("row", 3), ("row", 2)),
        (("row", 2), ("table", 1)),
        (("table", 3), ("row", 2)),
        (("row", 3), ("row", 3)),
        (("row", 8), ("row", 5)),  # more workers than table b has rows
    ],
)
def test_another_number_of_workers_goes_on_from_a_checkpoint_bit_for_bit(
    stack: ExitStack, tmp_path: Path, saved_by: tuple[str, int], loaded_by: tuple[str, int], optimizer: str
) -> None:
    first = cluster(stack, specs(saved_by[0], optimizer), saved_by[1])
    first.train(0, 4)
    folder = first.save(tmp_path / "step-4", 4)
    second = cluster(stack, specs(loaded_by[0], optimizer), loaded_by[1], seed=8)
    second.load(folder, 4)
    assert_same_bits(second.whole(), first.whole())
    assert {host.version for host in second.hosts.values()} == {4}
    first.train(4, 3)
    second.train(4, 3)
    assert_same_bits(second.whole(), first.whole())


def test_saving_waits_for_the_update_under_way(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last backward pass returns before its update is applied; a checkpoint must have it all the same."""
    (host,) = cluster(stack, specs(optimizer="sgd"), 1).hosts.values()
    shard = host.groups[0].group.shards[0]
    before = host.shard_tensors(shard)["weight"].clone()
    update = host.groups[0].update
    under_way, may_end = threading.Event(), threading.Event()

    def slow_update(parts: list[tuple[Bags, Tensor]]) -> None:
        under_way.set()
        assert may_end.wait(PATIENCE_SECONDS)
        update(parts)

    monkeypatch.setattr(host.groups[0], "update", slow_update)
    host.contribute(Ticket(0, 0, True), [(0, Bags(torch.tensor([1])), torch.ones(1, 3))])
    assert under_way.wait(PATIENCE_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(host.save, tmp_path)
        wait([saving], timeout=0.02)  # an end to this would be too soon
        may_end.set()
        saving.result(PATIENCE_SECONDS)
    saved = load_file(tmp_path / checkpoint.shard_file("a", 0, 1))["weight"]
    torch.testing.assert_close(saved[1], before[1] - 0.1)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (specs(dim=4), r"table \w has another shape or optimizer"),
        (specs(optimizer="sgd"), r"table \w has another shape or optimizer"),
        (specs(optimizer="rowwise_adagrad"), r"table \w has another shape or optimizer"),
        ([dataclasses.replace(specs()[0], num_rows=12)], "table a has fewer rows than the model's"),
        (
            [dataclasses.replace(specs()[0], name="z", features=("z",))],
            "holds no table z; it is of another model",
        ),
    ],
    ids=["dim", "no state", "other state", "more rows", "other table"],
)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_checkpoint_of_other_tables_is_refused(
    stack: ExitStack, tmp_path: Path, tables: list[TableSpec], message: str, num_workers: int
) -> None:
    folder = cluster(stack, specs("row"), 2).save(tmp_path / "step-0", 0)
    other = cluster(stack, tables, num_workers)
    with pytest.raises(CheckpointError, match=message) as caught:
        other.load(folder, 0)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("optimizer", TABLE_OPTIMIZERS)
def test_the_planned_bytes_are_those_of_the_tensors(stack: ExitStack, optimizer: str) -> None:
    each = cluster(stack, specs("row", optimizer), 2)
    for shard in each.placement.shards:
        tensors = each.hosts[shard.worker].shard_tensors(shard).values()
        assert sum(t.numel() * t.element_size() for t in tensors) == shard.num_bytes


def test_a_worker_holds_its_tables_in_one_tensor_a_group(stack: ExitStack) -> None:
    """Nothing but the rows and their state: the tensors of all shards are views into the group's."""
    for host in cluster(stack, specs("row"), 2).hosts.values():
        (group,) = host.groups
        assert group.weight_RD.shape == (group.group.num_rows, 3)
        for shard in group.group.shards:
            weight = host.shard_tensors(shard)["weight"]
            assert weight.untyped_storage().data_ptr() == group.weight_RD.untyped_storage().data_ptr()


@contextmanager
def two_trainers(optimizer: str, mode: UpdateMode) -> Iterator[TableShards]:
    table = TableSpec("t", 6, 2, Pooling.SUM, ("t",), OptimizerSpec(optimizer, 1.0), 1.0)
    host = TableShards(plan([table], 1), 0, 2, mode, PATIENCE_SECONDS)
    host.initialise(seed=7)
    try:
        yield host
    finally:
        host.close()


def test_the_gradients_of_all_trainers_are_one_update() -> None:
    """Adagrad moves a row by the learning rate at its first step; two steps would move it further."""
    with two_trainers("adagrad", UpdateMode.SYNC) as host:
        before = host.groups[0].weight_RD.clone()
        for trainer, items in ((1, [2, 2]), (0, [2, 5])):
            (pooled,) = host.lookup(Ticket(trainer, 0, True), [(0, Bags(torch.tensor(items)))]).wait()
            pooled.sum().backward()
        host.lookup(Ticket(0, 1, False), []).wait()
        moved = before - host.groups[0].weight_RD
        expected = torch.zeros(6, 2)
        expected[[2, 5]] = 1.0
        torch.testing.assert_close(moved, expected)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_rows_read_both_one_by_one_and_pooled_are_updated_once(optimizer: str) -> None:
    with two_trainers(optimizer, UpdateMode.SYNC) as host:
        rows = host.groups[0].weight_RD
        before = rows.clone().requires_grad_()
        single, mean, largest = torch.tensor([1, 3]), torch.tensor([3, 1, 1]), torch.tensor([3, 4])
        items = [
            (0, Bags(single)),
            (0, Bags(mean, torch.tensor([0, 2, 2, 3]), None, Pooling.MEAN)),
            (0, Bags(largest, torch.tensor([0, 2]), None, Pooling.MAX)),
        ]
        for trainer in range(2):
            torch.cat(host.lookup(Ticket(trainer, 0, True), items).wait()).sum().backward()
        host.lookup(Ticket(0, 1, False), []).wait()
        assert host.version == 1
        pooled = before[single].sum() + before[mean[:2]].mean(0).sum() + before[mean[2]].sum()
        (gradient,) = torch.autograd.grad(2 * (pooled + before[largest].max(0).values.sum()), before)
        # Adagrad's first step is the learning rate in the direction of the whole gradient.
        expected = gradient if optimizer == "sgd" else gradient.sign()
        torch.testing.assert_close(before.detach() - rows, expected)


def test_asynchronous_updates_come_one_by_one() -> None:
    with two_trainers("sgd", UpdateMode.ASYNC) as host:
        before = host.groups[0].weight_RD.clone()
        (pooled,) = host.lookup(Ticket(1, 3, True), [(0, Bags(torch.tensor([2])))]).wait()
        pooled.sum().backward()
        host._barrier.drain()
        assert host.version == 1  # the other trainer sent nothing
        torch.testing.assert_close((before - host.groups[0].weight_RD).sum(), torch.tensor(2.0))


def test_evaluation_records_nothing() -> None:
    with two_trainers("sgd", UpdateMode.SYNC) as host:
        (pooled,) = host.lookup(Ticket(0, 0, False), [(0, Bags(torch.tensor([2])))]).wait()
        assert not pooled.requires_grad

"""Growing tables on workers, compared with dictionaries in one process."""

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.shards import Cluster, evaluate, train
from torch import Tensor

from hybrid.checkpoint.checkpoint_folders import Files, Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.data.values.canonical import compute_keys
from hybrid.embedding.bags import Bags
from hybrid.embedding.initial_rows import random_rows
from hybrid.embedding.placement import place
from hybrid.embedding.table_spec import Growth, OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.errors import CheckpointError, ClusterError
from hybrid.primitives.key_hashes import next_random
from hybrid.reference.reference_keys import ReferenceKeys
from hybrid.reference.reference_rows import initial_state, update_rows
from hybrid.updates.update_rules import UpdateRules

SEED, DIM = 7, 3
# The keys at the ends of the range, of two buckets only so that limits are reached, and any keys.
EDGES = [0, -1, 1, 2**63 - 1, -(2**63)]


def spec(growth: Growth, optimizer: str = "adam") -> TableSpec:
    settings = OptimizerSpec(optimizer, 0.1)
    return TableSpec("t", 0, DIM, Pooling.SUM, ("f",), settings, init_scale=0.5, growth=growth)


class Workers(Cluster):
    """A growing table on some workers, with the trainers' calls in this process."""

    def __init__(self, table: TableSpec, num_workers: int, num_trainers: int = 1) -> None:
        super().__init__([table], num_workers, SEED, UpdateRules(num_trainers))

    def read(self, keys: Sequence[int], step: int) -> Tensor:
        rows = torch.empty(len(keys), DIM)
        ids = torch.tensor(keys)
        for host, own in self._owned(ids):
            (rows[own],) = host.lookup(evaluate(step), [(0, Bags(ids[own]))]).wait()
        return rows

    def update(self, step: int, trainer: int, keys: Tensor, grad: Tensor) -> None:
        for host, own in self._owned(keys):
            host.contribute(train(step, trainer), [(0, Bags(keys[own]))], [grad[own]])

    def _owned(self, keys: Tensor) -> Iterator[tuple[TableShards, Tensor]]:
        buckets = torch.from_numpy((keys.numpy().view(np.uint64) >> np.uint64(54)).astype(np.int64))
        for shard in self.placement.shards:
            own = (buckets >= shard.buckets.start) & (buckets < shard.buckets.stop)
            yield self.hosts[shard.worker], own


class Dictionary:
    """The same table as a dictionary from keys to rows."""

    def __init__(self, table: TableSpec) -> None:
        assert table.growth is not None
        self.table = table
        self.keys = ReferenceKeys(table.growth)
        self.rows = torch.empty(0, DIM)
        self.state = initial_state(table.optimizer, self.rows)

    def initial(self, keys: Sequence[int]) -> Tensor:
        return random_rows(np.array([*keys], np.uint64), self.table, SEED)

    def read(self, keys: Sequence[int]) -> Tensor:
        rows = self.initial([key % 2**64 for key in keys])
        found = [self.keys.row_of.get(key % 2**64, -1) for key in keys]
        has_row = torch.tensor(found) >= 0
        rows[has_row] = self.rows[[row for row in found if row >= 0]]
        return rows

    def update(self, step: int, messages: Sequence[tuple[Tensor, Tensor]]) -> None:
        unsigned = [keys.numpy().view(np.uint64) for keys, _ in messages]
        keys = np.unique(np.concatenate(unsigned))
        sums = torch.zeros(len(keys), DIM)
        for own, (_, grad) in zip(unsigned, messages, strict=True):
            sums[np.searchsorted(keys, own)] += grad
        admitted = self.keys.count(keys.tolist(), step)
        self.rows = torch.cat([self.rows, self.initial(admitted)])
        self.state = {
            name: torch.cat([tensor, tensor.new_zeros(len(admitted), *tensor.shape[1:])])
            for name, tensor in self.state.items()
        }
        rows = torch.tensor([self.keys.row_of.get(key, -1) for key in keys.tolist()])
        if (is_updated := rows >= 0).any():
            update_rows(self.table.optimizer, 0.1, self.rows, self.state, rows[is_updated], sums[is_updated])
        self.keys.sweep(step)


def draw(random: np.random.Generator, step: int) -> Tensor:
    """Return distinct keys in random order: old ones, later ones at later steps, and many of two buckets."""
    pool = np.random.default_rng(5).integers(-(2**63), 2**63 - 1, 4000)
    pool[::2] = (pool[::2] & (2**54 - 1)) | (3 << 54) | (np.arange(2000) % 2 << 60)
    ranks = (1000 * random.random(int(random.integers(0, 100))) ** 2).astype(int) + 40 * step
    keys = np.unique(np.concatenate([pool[ranks % len(pool)], random.choice(EDGES, 2)]))
    return torch.from_numpy(random.permutation(keys))


GROWTHS = {
    "plain": Growth(),
    "admit": Growth(admit_after=2, half_life=7),
    "age": Growth(evict_after=9),
    "limit": Growth(max_rows=8 * 1024, half_life=5),
    "all": Growth(admit_after=3, max_rows=12 * 1024, evict_after=20, half_life=11),
}


@pytest.mark.parametrize("kind", GROWTHS)
def test_table_equals_a_dictionary(kind: str, tmp_path: Path) -> None:
    """Bit for bit, for any number of workers, also over checkpoints that another number of workers loads."""
    table = spec(growth := GROWTHS[kind])
    expected, random, step = Dictionary(table), np.random.default_rng(3), 0
    for phase, num_workers in enumerate((1, 3, 2)):
        with closing(Workers(table, num_workers, num_trainers=3)) as actual:
            if phase:
                actual.load(tmp_path / str(phase - 1), step)
            for _ in range(10):
                messages = []
                for _ in range(3):
                    keys = draw(random, step)
                    grad = torch.from_numpy(random.standard_normal((len(keys), DIM))).float()
                    messages.append((keys, grad))
                    assert torch.equal(actual.read(keys.tolist(), step), expected.read(keys.tolist()))
                for trainer in (2, 0, 1):
                    actual.update(step, trainer, *messages[trainer])
                expected.update(step, messages)
                step += 1
            everything = [key - (key >> 63 << 64) for key in expected.keys.seen]
            assert torch.equal(actual.read(everything, step), expected.read(everything))
            actual.save(tmp_path / str(phase), step)
            check_checkpoint(tmp_path / str(phase), expected)
    if growth.max_rows or growth.evict_after:
        assert expected.keys._next_row > len(expected.keys.row_of), "rows were removed"


def check_checkpoint(folder: Path, expected: Dictionary) -> None:
    checkpoint = Checkpoint.open(folder)
    shards = [
        {name: torch.tensor(array) for name, array in checkpoint.map_shard("t", index).items()}
        for index in range(checkpoint.num_shards("t"))
    ]
    stored = {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
    assert not stored["steps_before"].any()
    keys = sorted(expected.keys.row_of)
    rows = [expected.keys.row_of[key] for key in keys]
    assert [key % 2**64 for key in stored["keys"].tolist()] == keys
    assert torch.equal(stored["weight"], expected.rows[rows])
    for name, tensor in expected.state.items():
        assert torch.equal(stored[name], tensor[rows])
    pending = sorted(expected.keys.seen.keys() - expected.keys.row_of.keys())
    assert [key % 2**64 for key in stored["pending_keys"].tolist()] == pending
    for prefix, of_keys in (("", keys), ("pending_", pending)):
        records = zip(stored[prefix + "counts"].tolist(), stored[prefix + "last_steps"].tolist(), strict=True)
        assert [*records] == [expected.keys.seen[key] for key in of_keys]


def test_each_initial_row_is_at_the_worker_of_its_key(tmp_path: Path) -> None:
    """Each bucket has some keys, also at the ends of the workers' ranges. One value has two rows."""
    values = [f"v{number}" for number in range(9_000)]
    rows = torch.arange(9_001.0 * DIM).view(-1, DIM)
    stored = {"key": [values[7], *values], "vector": rows.tolist()}
    pq.write_table(pa.table(stored), tmp_path / "rows.parquet")
    path = str(tmp_path / "rows.parquet")
    table = dataclasses.replace(spec(Growth()), initial=path, encoder_folder=str(tmp_path))
    with closing(Workers(table, 3)) as actual:
        assert torch.equal(actual.read(compute_keys(pa.array(values)).tolist(), 0), rows[1:])
        assert sum(host.take_counts()["t"]["rows"] for host in actual.hosts.values()) == len(values)
        actual.save(tmp_path / "saved", 0)
        actual.load(tmp_path / "saved", 0)  # which refuses rows of keys that are not admitted


def test_lookups_during_updates_read_the_right_rows() -> None:
    """Rows move, grow and are removed meanwhile. With a rate of 0, each key always has its initial row."""
    growth = Growth(max_rows=16 * 1024, half_life=2)
    table = dataclasses.replace(spec(growth, "sgd"), optimizer=OptimizerSpec("sgd", 0.0))
    expected, random = Dictionary(table), np.random.default_rng(3)
    keys = torch.from_numpy(random.integers(-(2**63), 2**63 - 1, (80, 1000)))
    rows = expected.initial([key % 2**64 for key in keys.view(-1).tolist()])
    with closing(Workers(table, 1)) as actual, ThreadPoolExecutor(1) as thread:

        def train() -> None:
            for step, each in enumerate(keys):
                actual.update(step, 0, each, torch.ones(len(each), DIM))
            actual.read([0], len(keys))  # after all updates

        training = thread.submit(train)
        reads = 0
        while not training.done() or not reads:
            assert torch.equal(actual.read(keys.view(-1)[::7].tolist(), 0), rows[::7])
            reads += 1
        training.result()
        counts = actual.hosts[0].take_counts()["t"]
    assert counts["rows"] <= growth.max_rows < counts["admitted"]
    assert counts["admitted"] - counts["evicted"] == counts["rows"]


@pytest.mark.parametrize("unknown", ["initial", "zeros"])
def test_a_key_without_a_row_reads_its_initial_row_in_training(unknown: str) -> None:
    table = spec(Growth(admit_after=2, unknown=unknown))
    initial = Dictionary(table).initial([5])
    with closing(Workers(table, 1)) as actual:
        (row,) = actual.hosts[0].lookup(train(0), [(0, Bags(torch.tensor([5])))]).wait()
        assert torch.equal(row.detach(), initial)
        row.sum().backward()  # counts the key once, which is not enough for a row
        assert torch.equal(actual.read([5], 1), initial if unknown == "initial" else torch.zeros(1, DIM))
        counts = {"rows": 0, "pending": 1, "lookups": 2, "unknown": 2, "admitted": 0, "evicted": 0}
        assert actual.hosts[0].take_counts() == {"t": counts}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.tensor([3, 2])}, "invalid keys"),
        ({"keys": torch.tensor([2, -(2**63)])}, "invalid keys"),  # of the other worker
        ({"keys": torch.tensor([2])}, "invalid keys"),
        ({"keys": torch.tensor([[2], [3]])}, "invalid keys"),
        ({"keys": torch.tensor([2, 2])}, "invalid keys"),
        ({"counts": torch.tensor([1, 0])}, "invalid keys"),
        ({"last_steps": torch.tensor([0, 2])}, "invalid keys"),
        ({"weight": torch.ones(3, DIM)}, "invalid keys"),
        ({"weight": torch.ones(2, DIM + 1)}, "shape or optimizer"),
        ({"weight": torch.ones(2, DIM, dtype=torch.int64)}, "holds no rows"),
        ({"weight": None}, "holds no rows"),
        ({"keys": None}, "without keys"),
        ({"pending_counts": torch.tensor([1])}, "invalid pending_keys"),
        ({"keys": torch.ones(2)}, "without keys"),
        ({"sum": torch.ones(2, DIM)}, "shape or optimizer"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_other_keys_are_refused(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    table = spec(Growth(), "sgd")
    with closing(Workers(table, 2)) as actual:
        actual.update(0, 0, torch.tensor([2, 3]), torch.ones(2, DIM))
        actual.save(tmp_path / "right", 1)
        actual.load(tmp_path / "right", 1)
        stored = Checkpoint.open(tmp_path / "right")
        files: Files = {}
        for index, name in enumerate(sorted(stored.manifest.files)):
            tensors = {**stored.tensors(name), **(change if index == 0 else {})}
            present = {kind: tensor for kind, tensor in tensors.items() if tensor is not None}
            files |= write_tensors(tmp_path / "wrong", name, present)
        Manifest(1, 0, actual.placement.shapes, files).write(tmp_path / "wrong")
        with pytest.raises(CheckpointError, match=rf"\bt\b.*{message}"):
            actual.load(tmp_path / "wrong", 1)


def test_rows_beyond_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, keys, grads = spec(Growth(), "sgd"), torch.arange(8000), torch.ones(8000, DIM)
    saved, refusal = tmp_path / "saved", r"table t: .* max_rows$"
    with closing(Workers(table, 1)) as actual:
        actual.update(0, 0, keys, grads)
        actual.save(saved, 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1 << 16))
    with closing(Workers(table, 1)) as small:
        with pytest.raises(ClusterError, match=refusal):
            small.load(saved, 1)
        small.update(0, 0, keys, grads)
        with pytest.raises(ClusterError, match=refusal):
            small.read([1], 1)


def test_a_bucket_that_grows_leaves_its_neighbors_as_they_are() -> None:
    """The system gets the memory of the old slots back."""
    numbers, buckets = torch.arange(300), torch.arange(100, 104) << 54
    table = spec(Growth(), "sgd")
    with closing(Workers(table, 1)) as actual:
        before = (buckets[:, None] + numbers[:150]).flatten()  # 256 slots of 16 bytes in each bucket
        for step, keys in enumerate((before, buckets[0] + numbers[150:])):
            actual.update(step, 0, keys, torch.ones(len(keys), DIM))
        read = torch.cat([before, buckets[0] + numbers[150:]]).tolist()
        assert torch.equal(actual.read(read, 2), Dictionary(table).initial(read) - 0.1)


@pytest.mark.parametrize(
    "rule", [{"admit_after": 0}, {"max_rows": 8191}, {"evict_after": -1}, {"half_life": 0}, {"unknown": "no"}]
)
def test_a_rule_out_of_range_is_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=min(rule)):
        Growth(**rule)


@pytest.mark.long
def test_a_worker_holds_a_hundred_million_keys() -> None:
    """Each key is updated once, and the rows of early and late keys are right."""
    per_step, num_steps = 1_000_000, 100
    table = dataclasses.replace(spec(Growth(), "sgd"), dim=4)
    with closing(TableShards(place([table], 1), 0, UpdateRules(1))) as host:
        host.initialize(SEED)
        for step in range(num_steps):
            keys = torch.from_numpy(keys_of_step(step, per_step).view(np.int64))
            host.contribute(train(step), [(0, Bags(keys))], [torch.ones(per_step, 4)])
            host.lookup(evaluate(step + 1), [(0, Bags(keys[:1]))]).wait()
        for step in (0, 50, 99):
            keys_U = keys_of_step(step, 10_000)
            bags = Bags(torch.from_numpy(keys_U.view(np.int64)))
            (rows,) = host.lookup(evaluate(num_steps), [(0, bags)]).wait()
            assert torch.equal(rows, random_rows(keys_U, table, SEED) - 0.1)
        assert host.take_counts()["t"]["rows"] == per_step * num_steps


def keys_of_step(step: int, number: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return the first keys that a step updates; no other step updates them."""
    return next_random(np.arange(number, dtype=np.uint64) + np.uint64(step * 1_000_000))

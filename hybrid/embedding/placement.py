"""Which worker holds which rows.

A table is on one worker (table-wise) or split over several (row-wise). A split is cyclic: of S shards, shard
s holds rows s, s + S, s + 2S, ... Vocabularies number frequent values first, so with contiguous ranges the
worker with the first range would get all the traffic.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from hybrid.config.validation import check_workers
from hybrid.embedding.pooling_side import BYTES_PER_ID, trainers_pool
from hybrid.embedding.table_spec import OptimizerSpec, TableSpec

# Splitting a smaller table saves little memory, and costs one more request per step.
MIN_SPLIT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows ``index``, ``index + count``, ``index + 2 * count``, ... of one table, on one worker."""

    table: TableSpec
    worker: int
    index: int = 0
    count: int = 1

    @property
    def num_rows(self) -> int:
        return (self.table.num_rows - self.index + self.count - 1) // self.count

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows and their optimizer state."""
        return self.num_rows * bytes_per_row(self.table)


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """Shards of one worker with the same width and optimizer, stored and looked up as one tensor.

    Shard i has the rows ``starts[i] : starts[i] + shards[i].num_rows`` of the group.
    """

    dim: int
    optimizer: OptimizerSpec
    shards: tuple[Shard, ...]
    starts: tuple[int, ...]
    num_rows: int

    @property
    def shard_starts(self) -> list[tuple[Shard, int]]:
        """Each shard, and its first row in the group."""
        return list(zip(self.shards, self.starts, strict=True))


class Location(NamedTuple):
    """Location of a shard: from row ``start`` of the group with index ``number`` of a worker."""

    worker: int
    number: int
    group: ShardGroup
    shard: Shard
    start: int


@dataclass(frozen=True, slots=True)
class Placement:
    """All shards of all tables; the same in each process of a run.

    Attributes:
        shards: the shards, table by table, and within a table by index.
        pooled_by_trainers: names of the tables whose bags trainers pool, from distinct rows. Workers pool the
            bags of other tables.
    """

    shards: tuple[Shard, ...]
    num_workers: int
    pooled_by_trainers: tuple[str, ...] = ()

    def of_worker(self, worker: int) -> tuple[Shard, ...]:
        return tuple(s for s in self.shards if s.worker == worker)

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Number of rows, width and number of shards of each table."""
        return {s.table.name: (s.table.num_rows, s.table.dim, s.count) for s in self.shards}

    def groups(self, worker: int) -> tuple[ShardGroup, ...]:
        """Return the groups of a worker. Trainers address rows by them, so both sides call this."""
        keyed: dict[tuple[int, OptimizerSpec], list[Shard]] = {}
        for shard in self.of_worker(worker):
            keyed.setdefault((shard.table.dim, shard.table.optimizer), []).append(shard)
        groups = []
        for (dim, optimizer), shards in keyed.items():
            starts, total = [], 0
            for shard in shards:
                starts.append(total)
                total += shard.num_rows
            groups.append(ShardGroup(dim, optimizer, tuple(shards), tuple(starts), total))
        return tuple(groups)

    def locations(self) -> Mapping[str, Sequence[Location]]:
        """Return the locations of the shards of each table, by worker."""
        locations: dict[str, list[Location]] = defaultdict(list)
        for worker in range(self.num_workers):
            for number, group in enumerate(self.groups(worker)):
                for shard, start in group.shard_starts:
                    locations[shard.table.name].append(Location(worker, number, group, shard, start))
        return locations


def state_values_per_row(table: TableSpec) -> int:
    """Return the number of values of optimizer state per row."""
    return {
        "frozen": 0,
        "sgd": 0,
        "momentum": table.dim,
        "adagrad": table.dim,
        "rowwise_adagrad": 1,
        "adam": 2 * table.dim + 1,
        "adamw": 2 * table.dim + 1,
        "ftrl": 2 * table.dim,
    }[table.optimizer.name]


def bytes_per_row(table: TableSpec) -> int:
    return (table.dim + state_values_per_row(table)) * table.bytes_per_value


def bytes_per_sample(table: TableSpec, ids_per_sample: Mapping[str, float]) -> float:
    """Return the bytes that a table moves per sample: ids, vectors and gradients."""
    ids = vectors = 0.0
    for feature in table.features:
        mean = ids_per_sample.get(feature, 1.0)
        ids += mean
        vectors += mean if table.read_by(feature).sequence else 1.0
    return ids * BYTES_PER_ID + 2 * vectors * table.dim * table.bytes_per_value


def place(
    tables: Sequence[TableSpec],
    num_workers: int,
    ids_per_sample: Mapping[str, float] = MappingProxyType({}),
    samples: float = 0,
    wire_bytes_per_value: int | None = None,
) -> Placement:
    """Place tables on workers, balancing bytes and traffic, and decide which side pools bags.

    Tables are placed largest first (Graham's LPT rule, 1969), each on the worker that minimizes the sum of
    squares of all workers' fractions of bytes and of traffic. With placement "auto", a table larger than the
    mean bytes of a worker is split over all its allowed workers.

    Args:
        ids_per_sample: mean number of ids of each multi-hot feature; 1 if absent.
        samples, wire_bytes_per_value: of a trainer's lookup; see :func:`trainers_pool`.

    Raises:
        ConfigError: a table names a worker that does not exist.
    """
    shards = _balance(tables, num_workers, ids_per_sample)
    counts = Counter(shard.table.name for shard in shards)
    load = ids_per_sample, samples, wire_bytes_per_value
    pooled = tuple(table.name for table in tables if trainers_pool(table, counts[table.name], *load))
    order = {table.name: i for i, table in enumerate(tables)}
    in_order = sorted(shards, key=lambda shard: (order[shard.table.name], shard.index))
    return Placement(tuple(in_order), num_workers, pooled)


def _balance(
    tables: Sequence[TableSpec], num_workers: int, ids_per_sample: Mapping[str, float]
) -> list[Shard]:
    traffic = {t.name: bytes_per_sample(t, ids_per_sample) for t in tables}
    total_bytes = sum(t.num_rows * bytes_per_row(t) for t in tables) or 1
    total_traffic = sum(traffic.values()) or 1.0

    fractions = {
        t.name: (t.num_rows * bytes_per_row(t) / total_bytes, traffic[t.name] / total_traffic) for t in tables
    }
    held, moved = [0.0] * num_workers, [0.0] * num_workers
    shards: list[Shard] = []
    for table in sorted(tables, key=lambda t: (-sum(fractions[t.name]), t.name)):
        num_bytes, num_moved = fractions[table.name]
        check_workers(table.name, table.workers, num_workers)
        allowed = list(dict.fromkeys(table.workers or range(num_workers)))
        is_split = table.placement == "row"
        if table.placement == "auto":
            total = table.num_rows * bytes_per_row(table)
            is_split = total > total_bytes / num_workers and total >= MIN_SPLIT_BYTES
        if is_split and len(allowed) > 1:
            targets = allowed[: table.num_rows]  # no shard is empty
        else:
            targets = [min(allowed, key=lambda w: (held[w] * num_bytes + moved[w] * num_moved, w))]
        for index, worker in enumerate(targets):
            shards.append(Shard(table, worker, index, len(targets)))
            held[worker] += num_bytes / len(targets)
            moved[worker] += num_moved / len(targets)
    return shards

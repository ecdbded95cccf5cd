"""The assignment of rows to workers, and of pooling to workers or trainers.

A table is on one worker (table-wise) or split over several (row-wise). A split is cyclic: of S shards, shard
s holds rows s, s + S, s + 2S, ... Vocabularies number frequent values first, so with contiguous ranges the
worker with the first range would get most of the traffic. The keys of a growing table are hashes, so each of
its shards holds a range of keys.

If workers pool, each worker of a table receives the ids of its rows, sends one vector per bag, and receives
one gradient per bag. If trainers pool, each trainer requests each distinct row once, and sends one gradient
per row. Which side should pool depends on how often samples repeat rows. The estimate takes all ids as
equally likely. Real ids repeat more often, so pooling by trainers moves fewer bytes than estimated.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

from hybrid.checkpoint.checkpoint_folders import shard_file
from hybrid.config.validation import check_workers
from hybrid.embedding.table_spec import STATE_TENSORS, AddressKey, OptimizerSpec, Pooling, TableSpec
from hybrid.primitives.key_hashes import buckets_of_shard

BYTES_PER_ID = 4  # an estimate: groups of more than 2^31 rows need 8
# Trainers pool if this moves less than this fraction of the bytes of pooling on workers. At half the bytes,
# both ways take the same processor time, summed over all roles.
_MAX_FRACTION_OF_BYTES = 0.5
_BYTES_PER_KEY = 43  # a slot of 16 bytes in a hash table that is 60 % full, and a record of 16 bytes
# Splitting a smaller table saves little memory, and costs more requests per step.
MIN_SPLIT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows ``index``, ``index + count``, ... of a table on a worker; or a range of a growing table's keys."""

    table: TableSpec
    worker: int
    index: int = 0
    count: int = 1

    @property
    def num_rows(self) -> int:
        """Number of rows; 0 for a growing table."""
        return (self.table.num_rows - self.index + self.count - 1) // self.count

    @property
    def file_name(self) -> str:
        """Relative path of the shard's file in a checkpoint, or in a delta, which has changed rows only."""
        return shard_file(self.table.name, self.index, self.count)

    @property
    def buckets(self) -> range:
        """The numbers of the buckets (ranges of keys) that this shard of a growing table holds."""
        return buckets_of_shard(self.index, self.count)

    @property
    def num_bytes(self) -> int:
        """Bytes of rows and optimizer state; for a growing table, the upper limit, or 0 without a limit."""
        num_rows = self.table.expected_rows // self.count if self.table.growth else self.num_rows
        return num_rows * bytes_per_row(self.table)


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """Shards of one worker with equal width, optimizer and type of rows, stored and looked up as one tensor.

    Shard i has the rows ``starts[i] : starts[i] + shards[i].num_rows`` of the group.
    """

    dim: int
    optimizer: OptimizerSpec
    shards: tuple[Shard, ...]
    starts: tuple[int, ...]
    num_rows: int

    @property
    def has_bfloat16_rows(self) -> bool:
        return self.shards[0].table.has_bfloat16_rows

    @property
    def shard_starts(self) -> list[tuple[Shard, int]]:
        """Pairs of a shard and its first row in the group."""
        return list(zip(self.shards, self.starts, strict=True))


class Location(NamedTuple):
    """The location of a shard, which starts at row ``start`` of group ``group_number`` of a worker."""

    worker: int
    group_number: int
    group: ShardGroup
    shard: Shard
    start: int


@dataclass(frozen=True, slots=True)
class Placement:
    """All shards of all tables; the same in each process of a run."""

    shards: tuple[Shard, ...]  # the shards, table by table, and within a table by index
    num_workers: int
    # Names of the tables that are pooled by trainers, from distinct rows. Workers pool the bags of other
    # tables.
    pooled_by_trainers: tuple[str, ...] = ()

    def of_worker(self, worker: int) -> tuple[Shard, ...]:
        return tuple(s for s in self.shards if s.worker == worker)

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Number of rows, width and number of shards of each table."""
        return {s.table.name: (s.table.num_rows, s.table.dim, s.count) for s in self.shards}

    def describe_tables(self) -> dict[str, dict[str, Any]]:
        """Return the rows (or their limit), width, bytes with optimizer state, and workers of each table."""
        tables: dict[str, dict[str, Any]] = {}
        for shard in self.shards:
            new = {"rows": shard.table.expected_rows, "dim": shard.table.dim, "bytes": 0, "workers": []}
            table = tables.setdefault(shard.table.name, new)
            table["bytes"] += shard.num_bytes
            table["workers"].append(shard.worker)
        return tables

    def groups(self, worker: int) -> tuple[ShardGroup, ...]:
        """Return the groups of a worker. Trainers also call this, since they address rows by group."""
        keyed: dict[tuple[AddressKey, OptimizerSpec, bool], list[Shard]] = {}
        for shard in self.of_worker(worker):
            table = shard.table
            key = table.address_key, table.optimizer, table.has_bfloat16_rows
            keyed.setdefault(key, []).append(shard)
        groups = []
        for ((dim, _), optimizer, _), shards in keyed.items():
            *starts, total = accumulate((shard.num_rows for shard in shards), initial=0)
            groups.append(ShardGroup(dim, optimizer, tuple(shards), tuple(starts), total))
        return tuple(groups)

    def locations(self) -> Mapping[str, Sequence[Location]]:
        """Return, by table name, the locations of the table's shards, ordered by worker."""
        locations: dict[str, list[Location]] = defaultdict(list)
        for worker in range(self.num_workers):
            for number, group in enumerate(self.groups(worker)):
                for shard, start in group.shard_starts:
                    locations[shard.table.name].append(Location(worker, number, group, shard, start))
        return locations


def bytes_per_row(table: TableSpec) -> int:
    """Return the bytes of a row, its optimizer state, and, in a growing table, its key."""
    bytes_of_key = _BYTES_PER_KEY if table.growth else 0
    of_values, of_row = STATE_TENSORS.get(table.optimizer.name, ((), ()))
    bytes_of_state = (len(of_values) * table.dim + len(of_row)) * table.bytes_per_value
    return table.dim * table.row_bytes_per_value + bytes_of_state + bytes_of_key


def bytes_per_sample(table: TableSpec, ids_per_sample: Mapping[str, float]) -> float:
    """Estimate the bytes of ids, vectors and gradients sent per sample for a table, if workers pool."""
    ids = vectors = 0.0
    for feature in table.features:
        mean = ids_per_sample.get(feature, 1.0)
        ids += mean
        vectors += mean if table.for_feature(feature).sequence else 1.0
    return ids * BYTES_PER_ID + 2 * vectors * table.dim * table.bytes_per_value


def bag_sizes(table: TableSpec, ids_per_sample: Mapping[str, float]) -> dict[Pooling, list[float]]:
    """Return, for each kind of pooling, the mean number of ids per bag of each feature with this pooling.

    Args:
        ids_per_sample: mean number of ids by multi-hot feature. Other features and sequences are left out.
    """
    means: dict[Pooling, list[float]] = defaultdict(list)
    for name in table.features:
        read = table.for_feature(name)
        if name in ids_per_sample and not read.sequence:
            means[read.pooling].append(ids_per_sample[name])
    return means


def unpooled_ids(table: TableSpec, ids_per_sample: Mapping[str, float]) -> tuple[float, int]:
    """Return the mean number of ids, and the number of vectors, per sample of a table's unpooled features."""
    ids = 0.0
    vectors = 0
    for name in table.features:
        read = table.for_feature(name)
        if name not in ids_per_sample or read.sequence:
            ids += ids_per_sample.get(name, 1.0)
            vectors += read.num_vectors
    return ids, vectors


def should_trainers_pool(
    table: TableSpec,
    num_shards: int,
    ids_per_sample: Mapping[str, float],
    samples: float,
    wire_bytes_per_value: int | None = None,
) -> bool:
    """Return whether trainers, instead of workers, pool the bags of a table.

    Trainers always pool a growing table, so that workers receive each key once. Trainers also pool a split
    table with max pooling: the gradient goes to the first of equal values in a bag, and a worker with some of
    the rows cannot tell which value is first. Otherwise, ``table.pooled_by`` decides. With "auto", trainers
    pool if this more than halves the sent bytes.

    Args:
        num_shards: number of workers that hold the table.
        ids_per_sample: see :func:`bag_sizes`. With "auto", workers pool if no feature of the table is in it.
        samples: number of samples of a trainer's lookup; 0 if unknown. With "auto" and 0, workers pool.
        wire_bytes_per_value: bytes of each sent value; None if values are sent as they are stored.
    """
    if table.growth is not None:
        return True
    reads = [table.for_feature(name) for name in table.features]
    if num_shards > 1 and any(read.pooling is Pooling.MAX and not read.sequence for read in reads):
        return True
    if table.pooled_by != "auto":
        return table.pooled_by == "trainers"
    grad_bytes = table.dim * (wire_bytes_per_value or table.bytes_per_value)
    row_bytes = table.dim * (wire_bytes_per_value or table.row_bytes_per_value)
    num_bags = num_ids = num_distinct = 0.0
    for means in bag_sizes(table, ids_per_sample).values():
        draws = samples * sum(means)
        num_bags += samples * len(means)
        num_ids += draws
        # The expected number of distinct rows among equally likely ids.
        if table.num_rows == 1:
            num_distinct += min(1.0, draws)
        else:
            num_distinct -= table.num_rows * math.expm1(draws * math.log1p(-1 / table.num_rows))
    # A pooled vector has as many bytes as its gradient.
    by_workers = num_shards * num_bags * (2 * grad_bytes + BYTES_PER_ID) + num_ids * BYTES_PER_ID
    by_trainers = num_distinct * (row_bytes + grad_bytes + BYTES_PER_ID)
    return by_trainers < _MAX_FRACTION_OF_BYTES * by_workers


def place(
    tables: Sequence[TableSpec],
    num_workers: int,
    ids_per_sample: Mapping[str, float] = MappingProxyType({}),
    samples: float = 0,
    wire_bytes_per_value: int | None = None,
) -> Placement:
    """Place tables on workers, balancing bytes and traffic, and decide which side pools bags.

    Tables with the most bytes and traffic are placed first (Graham's LPT rule, 1969). A table that is not
    split goes to the allowed worker (``TableSpec.workers``) for which the squared fractions of bytes and of
    traffic have the least sum over all workers. With placement "auto", a table is split over all allowed
    workers if it grows, or if its bytes exceed the mean per worker and are at least ``MIN_SPLIT_BYTES``.

    Args:
        ids_per_sample: mean number of ids of each multi-hot feature. Other features count as one id.
        samples, wire_bytes_per_value: see :func:`should_trainers_pool`.

    Raises:
        ConfigError: a table names a worker that does not exist.
    """
    size_of = {t.name: t.expected_rows * bytes_per_row(t) for t in tables}
    traffic_of = {t.name: bytes_per_sample(t, ids_per_sample) for t in tables}
    total_bytes = sum(size_of.values()) or 1
    total_traffic = sum(traffic_of.values()) or 1.0
    fractions = {name: (size_of[name] / total_bytes, traffic_of[name] / total_traffic) for name in size_of}
    held = [0.0] * num_workers
    moved = [0.0] * num_workers
    shards_of: dict[str, list[Shard]] = {}
    for table in sorted(tables, key=lambda t: (-sum(fractions[t.name]), t.name)):
        size_fraction, traffic_fraction = fractions[table.name]
        check_workers(table.name, table.workers, num_workers)
        allowed = list(dict.fromkeys(table.workers or range(num_workers)))
        is_split = table.placement == "row"
        if table.placement == "auto":
            size = size_of[table.name]
            is_split = size > total_bytes / num_workers and size >= MIN_SPLIT_BYTES
            is_split = is_split or table.growth is not None
        if is_split and len(allowed) > 1:
            targets = allowed if table.growth else allowed[: table.num_rows]  # no shard is empty
        else:
            targets = [min(allowed, key=lambda w: (held[w] * size_fraction + moved[w] * traffic_fraction, w))]
        shards_of[table.name] = [Shard(table, worker, i, len(targets)) for i, worker in enumerate(targets)]
        for worker in targets:
            held[worker] += size_fraction / len(targets)
            moved[worker] += traffic_fraction / len(targets)
    load = ids_per_sample, samples, wire_bytes_per_value
    pooled = tuple(t.name for t in tables if should_trainers_pool(t, len(shards_of[t.name]), *load))
    return Placement(tuple(shard for t in tables for shard in shards_of[t.name]), num_workers, pooled)

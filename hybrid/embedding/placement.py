"""Which worker holds which rows.

A table lies whole on one worker (table-wise) or is split over several (row-wise). A split is cyclic:
of S shards, shard s holds rows s, s + S, s + 2S, ... Vocabularies number the frequent values first, so
contiguous ranges would put all the traffic on the worker with the first range; cyclic ones share it.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from hybrid.config.validation import check_workers
from hybrid.embedding.pooling_side import BYTES_PER_ID, trainers_pool
from hybrid.embedding.table_spec import OptimizerSpec, TableSpec

# Splitting a small table saves no memory worth having and costs one more message segment a step.
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
        """Bytes of its rows and of their optimizer state."""
        return self.num_rows * bytes_per_row(self.table)


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """Shards of one worker that share width and optimizer; stored as one tensor, looked up as one.

    Shard i occupies rows ``starts[i] : starts[i] + shards[i].num_rows`` of the group.
    """

    dim: int
    optimizer: OptimizerSpec
    shards: tuple[Shard, ...]
    starts: tuple[int, ...]
    num_rows: int

    @property
    def located(self) -> list[tuple[Shard, int]]:
        """Each shard, and the row of the group at which it begins."""
        return list(zip(self.shards, self.starts, strict=True))


class Location(NamedTuple):
    """Where a shard lies: in the group ``number`` of a worker, from its row ``start`` on."""

    worker: int
    number: int
    group: ShardGroup
    shard: Shard
    start: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Every shard of every table; the same value on every process of a run.

    Attributes:
        pooled_by_trainers: names of the tables whose bags trainers pool, of distinct rows; those of the
            others are pooled by the workers that hold them.
    """

    shards: tuple[Shard, ...]
    num_workers: int
    pooled_by_trainers: tuple[str, ...] = ()

    def of_worker(self, worker: int) -> tuple[Shard, ...]:
        return tuple(s for s in self.shards if s.worker == worker)

    def of_table(self, name: str) -> tuple[Shard, ...]:
        """The shards of one table, in the order of their index."""
        return tuple(sorted((s for s in self.shards if s.table.name == name), key=lambda s: s.index))

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Rows, width and number of shards of each table."""
        return {s.table.name: (s.table.num_rows, s.table.dim, s.count) for s in self.shards}

    def groups(self, worker: int) -> tuple[ShardGroup, ...]:
        """How a worker lays out its shards; trainers address rows by it, so both sides derive it here."""
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
        """Where the shards of each table lie, worker after worker."""
        found: dict[str, list[Location]] = defaultdict(list)
        for worker in range(self.num_workers):
            for number, group in enumerate(self.groups(worker)):
                for shard, start in zip(group.shards, group.starts, strict=True):
                    found[shard.table.name].append(Location(worker, number, group, shard, start))
        return found


def state_values_per_row(table: TableSpec) -> int:
    """Values of optimizer state that one row of ``table`` carries."""
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
    """Bytes on the wire that one sample costs this table: ids there, rows here, gradients back."""
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
    """Place ``tables`` on ``num_workers`` workers, balancing bytes held and moved; decide who pools bags.

    Tables go largest first (as in Graham's LPT rule, 1969), each to the worker that keeps the sum of
    squares of all workers' shares of bytes and of traffic least: a table with many bytes goes where few
    bytes are, one with much traffic where little is. With placement "auto" a table larger than a
    worker's fair share of the bytes is split over all its allowed workers.

    Args:
        ids_per_sample: mean number of ids of each multi-hot feature; 1 where absent.
        samples, wire_bytes_per_value: of a trainer's lookup, see :func:`trainers_pool`.

    Raises:
        ConfigError: a table names a worker that does not exist.
    """
    shards = _balanced(tables, num_workers, ids_per_sample)
    counts = Counter(shard.table.name for shard in shards)
    known = ids_per_sample, samples, wire_bytes_per_value
    pooled = tuple(table.name for table in tables if trainers_pool(table, counts[table.name], *known))
    order = {table.name: i for i, table in enumerate(tables)}
    in_order = sorted(shards, key=lambda shard: (order[shard.table.name], shard.index))
    return Placement(tuple(in_order), num_workers, pooled)


def _balanced(
    tables: Sequence[TableSpec], num_workers: int, ids_per_sample: Mapping[str, float]
) -> list[Shard]:
    traffic = {t.name: bytes_per_sample(t, ids_per_sample) for t in tables}
    total_bytes = sum(t.num_rows * bytes_per_row(t) for t in tables) or 1
    total_traffic = sum(traffic.values()) or 1.0

    shares = {
        t.name: (t.num_rows * bytes_per_row(t) / total_bytes, traffic[t.name] / total_traffic) for t in tables
    }
    held, moved = [0.0] * num_workers, [0.0] * num_workers
    shards: list[Shard] = []
    for table in sorted(tables, key=lambda t: (-sum(shares[t.name]), t.name)):
        num_bytes, num_moved = shares[table.name]
        check_workers(table.name, table.workers, num_workers)
        allowed = list(dict.fromkeys(table.workers or range(num_workers)))
        if _is_split(table, total_bytes / num_workers) and len(allowed) > 1:
            targets = allowed[: table.num_rows]  # no shard is empty
        else:
            targets = [min(allowed, key=lambda w: (held[w] * num_bytes + moved[w] * num_moved, w))]
        for index, worker in enumerate(targets):
            shards.append(Shard(table, worker, index, len(targets)))
            held[worker] += num_bytes / len(targets)
            moved[worker] += num_moved / len(targets)
    return shards


def _is_split(table: TableSpec, fair_share_bytes: float) -> bool:
    if table.placement != "auto":
        return table.placement == "row"
    num_bytes = table.num_rows * bytes_per_row(table)
    return num_bytes > fair_share_bytes and num_bytes >= MIN_SPLIT_BYTES

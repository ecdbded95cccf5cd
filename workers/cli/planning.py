"""``hybrid plan``: placement of tables, messages and bytes of a step, and memory.

Ids are assumed to be skewed as in the synthetic click log: id = floor(rows * u**3) for a uniform u. In tables
of many millions of rows, nearly all ids of a step are then distinct. A growing table is assumed to have
``max_rows`` rows, or a million if there is no limit. Roles are assigned to hosts in turn, trainers first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console, JustifyMethod
from rich.table import Table

from hybrid.config import RunConfig
from hybrid.config.data_sections import GROW
from hybrid.data.parse.column_layout import Layout
from hybrid.data.prepare.preparation import ensure_prepared, open_split
from hybrid.data.prepare.synthetic_log import INPUT_SPEC
from hybrid.data.stream.stream_cursor import open_source
from hybrid.data.stream.units import fit_on_blocks
from hybrid.dense.net_builder import build_dense_net
from hybrid.embedding.placement import BYTES_PER_ID, Placement, Shard, bag_sizes, bytes_per_row, unpooled_ids
from hybrid.embedding.table_spec import UNLIMITED_ROWS, TableSpec, tables_of
from hybrid.engine import model_builder
from hybrid.errors import ConfigError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.shared_memory.shared_slots import MAX_MEMBERS
from workers.console import transient_status

_GRADIENT_BYTES = 4
# Measured memory in addition to tables and nets: per process, per value of a vector, per byte of a message.
_TRAINER_BYTES, _BYTES_PER_VALUE = 52.67e6, 99.87
_WORKER_BYTES, _BYTES_PER_MESSAGE_BYTE = 41.05e6, 10.28
_BLOCKS = 3_000  # of a table; the rows of a block have nearly the same frequency

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Hosts:
    """The identical hosts of a cluster."""

    count: int
    memory_bytes: float  # of one host
    bytes_per_second: float  # network of one host, in each direction


class Traffic(NamedTuple):
    """Expected traffic of one lookup and its gradients, between one trainer and each worker."""

    up_bytes_W: Array  # ids and gradients, to each of W workers
    down_bytes_W: Array  # vectors, from each worker
    vector_values: float  # number of values in the vectors, or partial vectors, that the trainer assembles


@dataclass(frozen=True)
class Plan:
    """The expected traffic and memory of a run."""

    placement: Placement
    traffic: Traffic
    transfers: Mapping[str, tuple[int, float]]  # messages and bytes per step, by "SENDER -> RECEIVER"
    trainer_bytes: float  # memory of a trainer
    worker_bytes: float  # memory of the largest worker, with its copy of the rows for a checkpoint
    host_bytes: float  # memory of the trainers and workers of the fullest host
    network_seconds: float  # time that the busiest network of a host needs for the bytes of a step


def print_plan(config: RunConfig, hosts: Hosts, ids_per_sample: float | None) -> dict[str, Any]:
    """Print a plan, and return it for JSON; errors as for :func:`expected_data` and :func:`make_plan`."""
    input_spec, means = expected_data(config, ids_per_sample)
    plan = make_plan(config, input_spec, means, hosts)
    transfers = _table("transfer", "messages a step", "MiB a step")
    for name, (messages, num_bytes) in plan.transfers.items():
        transfers.add_row(name, f"{messages:,}", _mib(num_bytes))
    verdict = "DOES NOT SUFFICE" if plan.host_bytes > hosts.memory_bytes else "suffices"
    lines = [
        f"memory      {_gib(plan.worker_bytes)} a worker, with a copy of its rows for checkpoints; "
        f"{_gib(plan.trainer_bytes)} a trainer",
        f"            {verdict}: a host needs {_gib(plan.host_bytes)} of its {_gib(hosts.memory_bytes)}, "
        "besides 0.4 GiB for PyTorch and the master",
        f"network     a step takes at least {plan.network_seconds * 1e3:,.1f} ms between hosts",
    ]
    if not all(shard.table.expected_rows for shard in plan.placement.shards):
        rule = f"tables without max_rows are assumed to have {UNLIMITED_ROWS:,} rows each"
        lines.append(f"growing     {rule}")
    if any(each.multi_hot and each.name not in means for each in input_spec.sparse_features):
        lines.append("multi-hot   columns are assumed to have one id; data.stream=none counts their ids")
    console = Console()
    for part in (_shards(plan, means), "", _workers(config, plan), "", transfers, "", *lines):
        console.print(part, soft_wrap=True, highlight=False, markup=False)  # the terminal wraps long lines
    numbers = ("trainer_bytes", "worker_bytes", "host_bytes", "network_seconds")
    return {
        "tables": plan.placement.describe_tables(),
        "transfers": {name: {"messages": n, "bytes": size} for name, (n, size) in plan.transfers.items()},
        **{name: getattr(plan, name) for name in numbers},
        "is_sufficient": plan.host_bytes <= hosts.memory_bytes,
    }


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in headings:
        is_number = heading in ("rows", "dim", "tables", "messages a step") or heading.startswith("MiB")
        side: JustifyMethod = "right" if is_number else "left"
        table.add_column(heading, justify=side, no_wrap=is_number, overflow="fold")
    return table


def _shards(plan: Plan, ids_per_sample: Mapping[str, float]) -> Table:
    shards = _table("table", "rows", "dim", "optimizer", "MiB", "placement")
    for table, of_table in groupby(plan.placement.shards, lambda shard: shard.table):
        workers = [shard.worker for shard in of_table]
        location = f"worker{'s' * (len(workers) > 1)} {_ranges(workers)}"
        if bag_sizes(table, ids_per_sample):
            is_pooled_by_trainers = table.name in plan.placement.pooled_by_trainers
            location += f", pooled by {'trainers' if is_pooled_by_trainers else 'workers'}"
        shards.add_row(
            table.name,
            f"{_rows_of(table):,}" + (" (grows)" if table.growth is not None else ""),
            str(table.dim),
            table.optimizer.name + (", all rows" if table.optimizer.all_rows else ""),
            _mib(_rows_of(table) * bytes_per_row(table)),
            location,
        )
    return shards


def _ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers, such as ``0, 2`` or ``0-99``."""
    is_run = len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{numbers[0]}-{numbers[-1]}" if is_run else ", ".join(map(str, numbers))


def _workers(config: RunConfig, plan: Plan) -> Table:
    table = _table("worker", "tables", "rows", "MiB", "MiB moved a step")
    times = config.cluster.trainers * config.train.micro_batches
    moved_W = times * (plan.traffic.up_bytes_W + plan.traffic.down_bytes_W)
    cells = []
    for worker, moved in enumerate(moved_W.tolist()):
        held = plan.placement.of_worker(worker)
        num_rows, num_bytes = sum(map(_rows_of_shard, held)), sum(map(_bytes_of_shard, held))
        cells.append((str(len(held)), f"{num_rows:,}", _mib(num_bytes), _mib(moved)))
    for equal, run in groupby(range(len(cells)), lambda w: cells[w]):
        table.add_row(_ranges(list(run)), *equal)
    return table


def _rows_of(table: TableSpec) -> int:
    return table.expected_rows or UNLIMITED_ROWS


def _rows_of_shard(shard: Shard) -> int:
    return shard.num_rows or _rows_of(shard.table) // shard.count


def _bytes_of_shard(shard: Shard) -> int:
    return _rows_of_shard(shard) * bytes_per_row(shard.table)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.2f}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"


def expected_data(
    config: RunConfig, ids_per_sample: float | None = None
) -> tuple[InputSpec, Mapping[str, float]]:
    """Return the columns of the training samples, and the mean number of ids of each multi-hot feature.

    If table sizes or numbers of ids depend on the files, the data are prepared. Of a stream, only a sample is
    read, and the means are empty: the plan assumes that multi-hot features have one id.

    Args:
        ids_per_sample: mean number of ids of every sparse column; None if unknown.

    Raises:
        ConfigError: a key does not fit the files; or ``ids_per_sample`` is given for synthetic data, a fitted
            vocabulary, or sections [columns.NAME].
        DataError: the files are invalid.
    """
    data, is_given, vocabulary = config.data, ids_per_sample is not None, config.data.vocabulary_call
    is_hashed = vocabulary.name in ("hash", GROW) and data.format != "synthetic" and not config.columns
    if is_given and not is_hashed:
        rule = 'needs input files, data.vocabulary = "hash" or "grow", and no sections [columns.NAME]'
        raise ConfigError("--ids", rule, ids_per_sample)
    if data.format == "synthetic":
        return INPUT_SPEC, {}
    has_one_id = data.format == "criteo" or (data.format == "csv" and not data.multi_hot_separator)
    if is_hashed and (is_given or has_one_id):
        columns, num_rows = Layout.of(data, with_labels=False).data, vocabulary.arguments.get("rows", 0)
        features = tuple(FeatureSpec(name, num_rows, is_given) for name in columns.sparse)
        means = {} if ids_per_sample is None else dict.fromkeys(columns.sparse, ids_per_sample)
        return InputSpec(columns.dense, features), means
    with transient_status() as report:
        if data.is_stream:
            source = open_source(config, report)
            return fit_on_blocks(config, source.sample(source.find(None))).input_spec, {}
        folder = ensure_prepared(config, report)
    dataset = open_split(folder, "train", data)
    return dataset.input_spec, dataset.ids_per_sample


def make_plan(
    config: RunConfig, input_spec: InputSpec, ids_per_sample: Mapping[str, float], hosts: Hosts
) -> Plan:
    """Return the plan of a run; ConfigError if there are more hosts than trainers and workers together."""
    trainers, workers, lookups = config.cluster.trainers, config.cluster.workers, config.train.micro_batches
    if hosts.count > trainers + workers:
        rule = f"must be at most the {trainers + workers} trainers and workers"
        raise ConfigError("--hosts", rule, hosts.count)
    tables = model_builder.table_specs(config, input_spec)
    placement = model_builder.place_configured_tables(config, tables, ids_per_sample)
    samples = model_builder.samples_of_lookup(config)
    wire_bytes = model_builder.wire_bytes_per_value(config)
    moved = traffic(tables, placement, ids_per_sample, samples, wire_bytes)
    up_W, down_W = lookups * moved.up_bytes_W, lookups * moved.down_bytes_W
    widths = [table.width for table in tables_of(input_spec, tables)]
    parameters = sum(p.numel() for p in build_dense_net(config, input_spec, widths).parameters())

    # In sync mode, gradients do not travel with the next ids.
    rounds = trainers * lookups * (2 if config.train.update == "sync" else 1)
    is_ring = hosts.count > 1 or trainers > MAX_MEMBERS
    ring_bytes = 2 * (trainers - 1) / trainers * parameters * _GRADIENT_BYTES if is_ring else 0.0
    trainers_H = np.bincount(np.arange(trainers) % hosts.count, minlength=hosts.count)
    # 1 if a host has a worker, else 0. The product with a vector of values by worker has the sums by host.
    has_worker_HW = np.arange(hosts.count)[:, None] == (trainers + np.arange(workers)) % hosts.count
    # Bytes from each host to each other host.
    bytes_HH = np.outer(trainers_H, has_worker_HW @ up_W) + np.outer(has_worker_HW @ down_W, trainers_H)
    np.fill_diagonal(bytes_HH, 0.0)
    ring_H = trainers_H * ring_bytes if hosts.count > 1 else np.zeros(1)
    most_bytes = max((bytes_HH.sum(1) + ring_H).max(), (bytes_HH.sum(0) + ring_H).max())
    transfers = {
        "trainer -> worker": (workers * rounds, trainers * float(up_W.sum())),
        "worker -> trainer": (workers * rounds, trainers * float(down_W.sum())),
    }
    if is_ring:
        transfers["trainer -> trainer"] = (2 * trainers * (trainers - 1), trainers * ring_bytes)

    # Each parameter has a gradient and two values of optimizer state.
    trainer_bytes = _TRAINER_BYTES + _BYTES_PER_VALUE * lookups * moved.vector_values
    trainer_bytes += 4 * _GRADIENT_BYTES * parameters
    memory_W = _WORKER_BYTES + _BYTES_PER_MESSAGE_BYTE * trainers * (up_W + down_W)
    for shard in placement.shards:
        memory_W[shard.worker] += 2 * _bytes_of_shard(shard)  # with the copy
    return Plan(
        placement=placement,
        traffic=moved,
        transfers=transfers,
        trainer_bytes=trainer_bytes,
        worker_bytes=float(memory_W.max()),
        host_bytes=float((trainer_bytes * trainers_H + has_worker_HW @ memory_W).max()),
        network_seconds=float(most_bytes) / hosts.bytes_per_second,
    )


def traffic(
    tables: Sequence[TableSpec],
    placement: Placement,
    ids_per_sample: Mapping[str, float],
    samples: float,
    wire_bytes: int | None = None,
) -> Traffic:
    """Return the traffic of one lookup for ``samples`` samples.

    If workers pool a multi-hot feature, each shard of its table sends a partial vector per sample, and gets
    the gradient of the whole vector. For other features, shards send the distinct rows of the samples.

    Args:
        ids_per_sample: mean number of ids of each multi-hot feature; other features have one.
        wire_bytes: bytes of a value in a message; None for the data types of the rows and the gradients.
    """
    by_worker_2W, values = np.zeros((2, placement.num_workers)), 0.0
    for table in tables:
        holders = [shard.worker for shard in placement.shards if shard.table.name == table.name]
        num_shards = len(holders)
        bags = bag_sizes(table, ids_per_sample)
        ids_by_pooling = [samples * sum(means) for means in bags.values()]
        bag_total = sum(ids_by_pooling)
        unpooled, positions = (samples * each for each in unpooled_ids(table, ids_per_sample))
        rows = distinct_rows(_rows_of(table), unpooled)
        if table.name in placement.pooled_by_trainers:
            rows += sum(distinct_rows(_rows_of(table), draws) for draws in ids_by_pooling)
            bag_rows = vectors = 0.0
            values += (positions + bag_total) * table.dim
        else:
            # Each shard of a multi-hot table needs a pass over all ids, and sends partial vectors.
            bag_rows, vectors = bag_total / num_shards, samples * sum(map(len, bags.values()))
            values += (positions + vectors * num_shards) * table.dim
        rows /= num_shards
        row_bytes = rows * table.dim * (wire_bytes or table.row_bytes_per_value)
        pooled_bytes, grad_bytes = (
            number * table.dim * (wire_bytes or table.bytes_per_value) for number in (vectors, rows + vectors)
        )
        id_bytes = (rows + bag_rows + vectors) * BYTES_PER_ID  # bags have offsets beside their ids
        by_worker_2W[:, holders] += np.array((id_bytes + grad_bytes, row_bytes + pooled_bytes))[:, None]
    up_W, down_W = by_worker_2W
    return Traffic(up_W, down_W, values)


def distinct_rows(num_rows: int, draws: float) -> float:
    """Return the expected number of distinct rows among ``draws`` ids with the skew of the synthetic log."""
    ends = np.unique(np.append(0.0, np.geomspace(1, num_rows, _BLOCKS).round()))
    sizes = np.diff(ends)
    probability = np.diff(np.cbrt(ends / num_rows)) / sizes  # of each row of a block
    return float(sizes @ (1.0 - (1.0 - np.minimum(probability, 1.0)) ** draws))

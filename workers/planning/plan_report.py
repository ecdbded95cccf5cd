"""Planning a run: the columns of its data, where its tables lie, and what to expect of it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from hybrid.config import RunConfig
from hybrid.data.parse.column_layout import Layout
from hybrid.data.prepare.dataset_location import ensure_prepared, open_split
from hybrid.data.prepare.synthetic_log import ClickLog
from hybrid.embedding.placement import Shard, bytes_per_row
from hybrid.errors import ConfigError
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.storage.remote_path import StoragePath
from workers.console.terminal import passing_status
from workers.planning.step_model import Hosts, Plan, make_plan

_MAX_OPERATIONS = 3


def print_plan(config: RunConfig, cache: StoragePath, hosts: Hosts, ids_per_sample: float | None) -> None:
    """Print the shards of every table, what each worker holds and moves, and what limits the speed.

    Args:
        cache: folder of prepared data sets.
        ids_per_sample: as in :func:`expected_data`.

    Raises:
        ConfigError: there are more hosts than roles, or as from :func:`expected_data`.
    """
    data = expected_data(config, cache, ids_per_sample)
    plan = make_plan(config, *data, hosts)
    console = Console()
    parts: list[Table | str] = [_shards(plan, data.ids_per_sample), ""]
    links = _table("link", "messages a step", "MiB a step")
    for name, link in plan.links.items():
        links.add_row(name, f"{link.messages:,}", _mib(link.num_bytes))
    batch = config.train.batch_size
    speed = [f"samples/s   unknown: no costs were measured where {plan.unknown}"]
    if not plan.unknown:
        step = f"{batch:,} samples in {plan.step_seconds * 1e3:,.1f} ms"
        largest = sorted(plan.fractions.items(), key=lambda item: -item[1])[:_MAX_OPERATIONS]
        operations = ", ".join(f"{name} {fraction:.0%}" for name, fraction in largest)
        alone = ", ".join(f"{name} {seconds * 1e3:,.1f} ms" for name, seconds in plan.seconds.items())
        speed = [
            f"samples/s   {batch / plan.step_seconds:,.0f} ({step}), by the costs of one AMD EPYC core",
            f"limited by  {plan.limit}{f' ({operations})' if operations else ''}",
            f"            alone, a step would take: {alone}",
        ]
    needed = f"a host needs {_gib(plan.host_bytes)} of its {_gib(hosts.memory_bytes)}"
    verdict = "DOES NOT SUFFICE" if plan.host_bytes > hosts.memory_bytes else "suffices"
    parts += [
        _workers(config, plan),
        "",
        links,
        "",
        f"memory      {_gib(plan.worker_bytes)} a worker, {_gib(plan.trainer_bytes)} a trainer",
        f"            {verdict}: {needed}",
        *speed,
    ]
    for each in parts:  # the terminal wraps long lines
        console.print(each, soft_wrap=True, highlight=False, markup=False)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in headings:
        is_number = heading in ("rows", "dim", "tables", "messages a step") or heading.startswith("MiB")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    return table


def _shards(plan: Plan, ids_per_sample: Mapping[str, float]) -> Table:
    pooled_by = ["pooled by"] if ids_per_sample else []
    shards = _table("table", "rows", "dim", "pooling", *pooled_by, "optimizer", "MiB", "placement")
    holders = defaultdict(list)
    for shard in plan.placement.shards:
        holders[shard.table.name].append(shard.worker)
    for table in plan.tables:
        workers = holders[table.name]
        side = "trainers" if table.name in plan.placement.pooled_by_trainers else "workers"
        if ids_per_sample.keys().isdisjoint(table.features):
            side = ""  # no multi-hot features
        shards.add_row(
            table.name,
            f"{table.num_rows:,}",
            str(table.dim),
            table.pooling,
            *([side] if ids_per_sample else []),
            table.optimizer.name + (", all rows" if table.optimizer.all_rows else ""),
            _mib(table.num_rows * bytes_per_row(table)),
            f"worker {workers[0]}" if len(workers) == 1 else f"workers {_ranges(workers)}",
        )
    return shards


def _ranges(numbers: Sequence[int]) -> str:
    """Format numbers such as ``0, 1`` or ``0-99, 200``."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    parts = [[f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run) for run in runs]
    return ", ".join(text for part in parts for text in part)


def _workers(config: RunConfig, plan: Plan) -> Table:
    """What each worker holds; equal workers share a line."""
    workers = _table("worker", "tables", "rows", "MiB", "MiB moved a step")
    held: list[list[Shard]] = [[] for _ in range(plan.placement.num_workers)]
    for shard in plan.placement.shards:
        held[shard.worker].append(shard)
    times = config.cluster.trainers * config.train.micro_batches
    bytes_W = times * (plan.traffic.up_bytes_W + plan.traffic.down_bytes_W)
    cells = [
        (
            str(len(shards)),
            f"{sum(s.num_rows for s in shards):,}",
            _mib(sum(s.num_bytes for s in shards)),
            _mib(num_bytes),
        )
        for shards, num_bytes in zip(held, bytes_W.tolist(), strict=True)
    ]
    for equal, run in groupby(range(len(cells)), lambda w: cells[w]):
        workers.add_row(_ranges(list(run)), *equal)
    return workers


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.2f}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"


class Expected(NamedTuple):
    """Columns, and the mean number of ids of each multi-hot feature."""

    input_spec: InputSpec
    ids_per_sample: Mapping[str, float]


def expected_data(config: RunConfig, cache: StoragePath, ids_per_sample: float | None = None) -> Expected:
    """Return the columns of the training samples; prepare the data if nothing else defines them.

    The synthetic click log is known. With hashing, the size of tables is known, and the number of ids if each
    column holds one id or ``ids_per_sample`` is given.

    Args:
        cache: folder of prepared data sets.
        ids_per_sample: mean number of ids of every sparse column, if known.

    Raises:
        ConfigError: ``ids_per_sample`` is given for other columns, or a key does not fit the files.
        DataError: the files are invalid.
    """
    data, is_hashed = config.data, config.data.vocabulary_call.name == "hash"
    if ids_per_sample is not None and (not is_hashed or data.format == "synthetic"):
        rule = 'needs data.vocabulary = "hash": other tables have the rows of their data'
        raise ConfigError("--ids", rule, ids_per_sample)
    if ids_per_sample is not None and config.columns:
        rule = "needs a configuration without sections [columns.NAME], which change the number of ids"
        raise ConfigError("--ids", rule, ids_per_sample)
    if data.format == "synthetic":
        return Expected(ClickLog(config.run.seed).encoder.input_spec, {})
    is_multi_hot = ids_per_sample is not None
    has_one_id = data.format == "criteo" or (data.format == "csv" and not data.multi_hot_separator)
    if is_hashed and not config.columns and (is_multi_hot or has_one_id):
        columns = Layout.of(data, with_labels=False).data
        features = tuple(
            FeatureSpec(name, data.vocabulary_call["rows"], is_multi_hot) for name in columns.sparse
        )
        means = {} if ids_per_sample is None else dict.fromkeys(columns.sparse, ids_per_sample)
        return Expected(InputSpec(columns.dense, features), means)
    with passing_status() as report:
        folder = ensure_prepared(config, cache, report)
    dataset = open_split(folder, "train", data)
    return Expected(dataset.input_spec, dataset.ids_per_sample)

"""Printing where the tables of a run would lie, and what to expect of it."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from hybrid.config import RunConfig
from hybrid.embedding.placement import Placement, Shard, bytes_per_row
from hybrid.embedding.pooling_side import pooling_bytes
from hybrid.embedding.table_spec import TableSpec
from hybrid.embedding.traffic import Traffic
from hybrid.engine.table_setup import samples_of_lookup, wire_bytes_per_value
from hybrid.storage.remote_path import StoragePath
from workers.planning.costs import Costs
from workers.planning.demand import Demand, demand, why_not_modelled
from workers.planning.expected_data import expected_data
from workers.planning.forecast import Forecast, Hosts, forecast

_MOST_REASONS = 3


def print_plan(
    config: RunConfig, cache: StoragePath, hosts: Hosts, costs: Costs, ids_per_sample: float | None
) -> None:
    """Print the shards of every table, what each worker holds and moves, and what limits the whole.

    Args:
        cache: where prepared data sets are kept.
        ids_per_sample: as in :func:`expected_data`.

    Raises:
        ConfigError: there are more hosts than roles, or as from :func:`expected_data`.
    """
    data = expected_data(config, cache, ids_per_sample)
    asked = demand(config, *data, hosts=hosts.count)
    expected = forecast(asked, costs, hosts)
    console = Console()
    parts: list[Table | str] = [_shards(asked.tables, asked.placement), ""]
    if data.ids_per_sample:
        parts += [_bags(asked, data.ids_per_sample), ""]
    parts += [
        _workers(config, asked.placement, asked.traffic),
        "",
        _links(expected),
        "",
        *_memory_lines(config, hosts, expected),
    ]
    if reason := why_not_modelled(config):
        parts.append(f"samples/s   not foretold, since {reason}")
    else:
        parts += _speed_lines(asked, hosts, costs, expected)
    # In whole lines, which a terminal breaks where it must.
    for each in parts:
        console.print(each, soft_wrap=True, highlight=False, markup=False)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in headings:
        is_number = heading in ("rows", "dim", "tables", "messages a step") or heading.startswith("MiB")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    return table


def _shards(tables: Sequence[TableSpec], placement: Placement) -> Table:
    shards = _table("table", "rows", "dim", "pooling", "optimizer", "MiB", "placement")
    holders = defaultdict(list)
    for shard in placement.shards:
        holders[shard.table.name].append(shard.worker)
    for table in tables:
        workers = holders[table.name]
        shards.add_row(
            table.name,
            f"{table.num_rows:,}",
            str(table.dim),
            table.pooling,
            table.optimizer.name + (", all rows" if table.optimizer.all_rows else ""),
            _mib(table.num_rows * bytes_per_row(table)),
            f"worker {workers[0]}" if len(workers) == 1 else f"workers {_ranges(workers)}",
        )
    return shards


def _bags(asked: Demand, ids_per_sample: Mapping[str, float]) -> Table:
    """Who pools the bags of tables that have some, and what a step moves of them, either way."""
    config = asked.config
    known = ids_per_sample, samples_of_lookup(config), wire_bytes_per_value(config)
    lookups = config.cluster.trainers * config.train.micro_batches
    num_shards = Counter(shard.table.name for shard in asked.placement.shards)
    bags = _table("bags of", "pooled by", "MiB by workers", "MiB by trainers")
    for table in asked.tables:
        moved = pooling_bytes(table, num_shards[table.name], *known)
        if moved is not None:
            who = "trainers" if table.name in asked.placement.pooled_by_trainers else "workers"
            bags.add_row(table.name, who, *(_mib(lookups * num_bytes) for num_bytes in moved))
    return bags


def _ranges(numbers: Sequence[int]) -> str:
    """Such as ``0, 1`` or ``0-99, 200``: three in a row or more as their first and last."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    parts = [[f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run) for run in runs]
    return ", ".join(text for part in parts for text in part)


def _workers(config: RunConfig, placement: Placement, moved: Traffic) -> Table:
    workers = _table("worker", "tables", "rows", "MiB", "MiB moved a step")
    held: list[list[Shard]] = [[] for _ in range(placement.num_workers)]
    for shard in placement.shards:
        held[shard.worker].append(shard)
    times = config.cluster.trainers * config.train.micro_batches
    bytes_W = times * (moved.up_bytes_W + moved.down_bytes_W)
    cells = [
        (
            str(len(shards)),
            f"{sum(s.num_rows for s in shards):,}",
            _mib(sum(s.num_bytes for s in shards)),
            _mib(num_bytes),
        )
        for shards, num_bytes in zip(held, bytes_W.tolist(), strict=True)
    ]
    for same, run in groupby(range(len(cells)), lambda w: cells[w]):
        workers.add_row(_ranges(list(run)), *same)
    return workers


def _links(expected: Forecast) -> Table:
    table = _table("link", "messages a step", "MiB a step", "MiB of one, at most")
    for name, link in expected.links.items():
        table.add_row(name, f"{link.messages:,}", _mib(link.num_bytes), _mib(link.most_bytes))
    return table


def _memory_lines(config: RunConfig, hosts: Hosts, expected: Forecast) -> list[str]:
    line = f"memory      {_gib(expected.worker_bytes)} a worker, {_gib(expected.trainer_bytes)} a trainer"
    needed = f"{_gib(expected.host_bytes)} of its {_gib(hosts.memory_bytes)}"
    if expected.host_bytes > hosts.memory_bytes:
        return [line, f"            DOES NOT SUFFICE: a host needs {needed}"]
    return [line, f"            suffices: a host needs {needed}"]


def _speed_lines(asked: Demand, hosts: Hosts, costs: Costs, expected: Forecast) -> list[str]:
    rate = f"{expected.samples_per_second:,.0f}"
    step = f"{asked.config.train.batch_size:,} samples in {expected.step_seconds * 1e3:,.1f} ms"
    reasons = sorted(expected.reasons.items(), key=lambda item: -item[1])[:_MOST_REASONS]
    shares = ", ".join(f"{term.replace('_', ' ')} {share:.0%}" for term, share in reasons)
    limit = f"{expected.limit} ({shares})" if shares else expected.limit
    each = ", ".join(f"{name} {seconds * 1e3:,.1f} ms" for name, seconds in expected.seconds.items())
    return [
        f"samples/s   {rate} ({step}), by costs of {costs.origin}",
        f"limited by  {limit}",
        f"            alone, a step would take: {each}",
    ]


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.2f}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"

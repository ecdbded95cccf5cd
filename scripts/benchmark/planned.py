"""Plans of large clusters by costs that were measured: the tables of docs/planning.md."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

from benchmark.systems import ROOT
from benchmark.tables import TextTable
from hybrid.config.loading import load_config
from workers.planning.costs import Costs, cost
from workers.planning.demand import Demand, Terms, demand, messages
from workers.planning.expected_data import expected_data
from workers.planning.forecast import Forecast, Hosts, forecast

CONFIG = ROOT / "configs/trillion.toml"
SAMPLES = 2048  # of a trainer
CORES, MEMORY_BYTES, BYTES_PER_SECOND = 32, 512 * 2.0**30, 25e9 / 8  # of a host
# Workers, trainers, hosts.
CLUSTERS = ((10, 10, 10), (100, 10, 100), (100, 100, 100), (1000, 100, 1000), (1000, 1000, 1000))
SIZES = (10, 30, 100, 300, 1000)
_REASONS = 2


def planned_tables(costs: Costs) -> list[TextTable]:
    """A trillion parameters on clusters of any size, and what messages take of a step as it grows."""
    return [_clusters(costs), _message(costs), _growing(costs)]


@cache
def _asked(trainers: int, workers: int, hosts: int) -> Demand:
    cluster = {"trainers": trainers, "workers": workers}
    overrides = [f"cluster.{key}={value}" for key, value in cluster.items()]
    config = load_config(CONFIG, [*overrides, f"train.batch_size={SAMPLES * trainers}"])
    return demand(config, *expected_data(config, Path()), hosts=hosts)


def _forecast(asked: Demand, costs: Costs, hosts: int) -> Forecast:
    return forecast(asked, costs, Hosts(hosts, CORES, MEMORY_BYTES, BYTES_PER_SECOND))


def _clusters(costs: Costs) -> TextTable:
    header = (
        "workers, trainers, hosts",
        "GiB of a worker",
        "messages a step",
        "MiB a step that leave a host",
        "ms of a step",
        "samples/s",
        "limited by",
    )
    table = TextTable("A trillion parameters", header)
    for workers, trainers, hosts in CLUSTERS:
        asked = _asked(trainers, workers, hosts)
        found = _forecast(asked, costs, hosts)
        table.rows.append(
            (
                f"{workers:,}, {trainers:,}, {hosts:,}",
                f"{found.worker_bytes / 2**30:,.1f}",
                f"{messages(asked.config, hosts).total:,}",
                f"{found.links['host -> host'].most_bytes / 2**20:,.0f}",
                f"{found.step_seconds * 1e3:,.0f}",
                f"{found.samples_per_second:,.0f}",
                _limit(found),
            )
        )
    return table


def _limit(found: Forecast) -> str:
    reasons = sorted(found.reasons.items(), key=lambda item: -item[1])[:_REASONS]
    shares = ", ".join(f"{term.replace('_', ' ')} {share:.0%}" for term, share in reasons)
    return f"{found.limit} ({shares})" if shares else found.limit


def _message(costs: Costs) -> TextTable:
    table = TextTable("A message of a step, ms of processor time", ("by", "trainer", "worker", "both"))
    for kind, name in {"socket": "socket", "rpc": "RPC"}.items():
        of_worker = costs.worker_seconds[f"{kind}_message"] + costs.worker_seconds["part"]
        each = [costs.trainer_seconds[f"{kind}_message"], of_worker]
        table.rows.append((name, *(f"{seconds * 1e3:.2f}" for seconds in (*each, sum(each)))))
    return table


def _growing(costs: Costs) -> TextTable:
    header = (
        "trainers, workers, hosts",
        "messages a step",
        "samples/s",
        "messages' share of a worker",
        "of a trainer",
        "a step is longer by",
    )
    table = TextTable("What messages take of a step", header)
    for size in SIZES:
        asked = _asked(size, size, size)
        found = _forecast(asked, costs, size)
        without = _forecast(asked, _without_messages(costs), size)
        shares = (
            _share(costs.worker_seconds, asked.workers[0]),
            _share(costs.trainer_seconds, asked.trainer),
            found.step_seconds / without.step_seconds - 1,
        )
        cells = [f"{found.samples_per_second:,.0f}", *(f"{share:.0%}" for share in shares)]
        table.rows.append((f"{size:,} each", f"{size * size:,}", *cells))
    return table


def _without_messages(costs: Costs) -> Costs:
    free = {"socket_message": 0.0}
    trainer, worker = {**costs.trainer_seconds, **free}, {**costs.worker_seconds, **free, "part": 0.0}
    return dataclasses.replace(costs, trainer_seconds=trainer, worker_seconds=worker)


def _share(coefficients: Terms, terms: Terms) -> float:
    names = ("socket_message", "part")
    return sum(coefficients[name] * terms[name] for name in names if name in terms) / cost(
        coefficients, terms
    )

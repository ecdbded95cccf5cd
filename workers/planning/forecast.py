"""What hosts would make of a demand: what links carry, memory, samples a second, and what limits them.

Roles are dealt to hosts in turn, trainers first. In ``pipelined`` and ``async`` trainers, workers and network
work at the same time, so a step takes as long as the slowest of them; in ``sync`` they wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybrid.errors import ConfigError
from workers.planning.costs import Costs, cost
from workers.planning.demand import BYTES_PER_GRADIENT, Demand, Terms, gradient_bytes, messages

TRAINERS, WORKERS, NETWORK = "trainers' cores", "workers' cores", "network of a host"


@dataclass(frozen=True)
class Hosts:
    """Machines that are all alike.

    Attributes:
        cores: of a host.
        memory_bytes: of a host.
        bytes_per_second: of a host's network, each way.
    """

    count: int
    cores: int
    memory_bytes: float
    bytes_per_second: float


@dataclass(frozen=True)
class Link:
    """What a step sends from one kind of place to another.

    Attributes:
        messages, num_bytes: of all of them together.
        most_bytes: of the one that sends most.
    """

    messages: int
    num_bytes: float
    most_bytes: float


@dataclass(frozen=True)
class Forecast:
    """What is to be expected.

    Attributes:
        links: by name, such as "trainer -> worker".
        trainer_bytes, worker_bytes: memory of a trainer, and of the largest worker.
        host_bytes: memory of all roles of the fullest host.
        seconds: of a step, that each possible limit by itself would take.
        limit: which of these takes longest.
        reasons: shares of the seconds of the limiting role, by term; empty for the network.
        step_seconds, samples_per_second: of the cluster.
    """

    links: Mapping[str, Link]
    trainer_bytes: float
    worker_bytes: float
    host_bytes: float
    seconds: Mapping[str, float]
    limit: str
    reasons: Terms
    step_seconds: float
    samples_per_second: float


class _Dealt:
    """Which host has how many trainers, and which workers."""

    def __init__(self, demand: Demand, hosts: Hosts) -> None:
        self.trainers, self.workers = demand.cluster.trainers, demand.cluster.workers
        roles = self.trainers + self.workers
        if hosts.count > roles:
            raise ConfigError("--hosts", f"must be at most the {roles} trainers and workers", hosts.count)
        self.hosts = hosts.count
        self.trainers_H = np.bincount(np.arange(self.trainers) % self.hosts, minlength=self.hosts)
        self._host_of_W = (self.trainers + np.arange(self.workers)) % self.hosts

    def of_workers(self, value_W: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The sum of each host's workers."""
        of_H: npt.NDArray[np.float64] = np.bincount(self._host_of_W, value_W, self.hosts).astype(np.float64)
        return of_H


def forecast(demand: Demand, costs: Costs, hosts: Hosts) -> Forecast:
    """What to expect of ``demand`` on ``hosts``.

    Raises:
        ConfigError: there are more hosts than roles.
    """
    dealt = _Dealt(demand, hosts)
    out_H, in_H, crossing = _between_hosts(demand, dealt)
    trainer = cost(costs.trainer_seconds, demand.trainer)
    seconds_W = np.array([cost(costs.worker_seconds, terms) for terms in demand.workers])
    of_trainers_H, of_workers_H = trainer * dealt.trainers_H, dealt.of_workers(seconds_W)
    fullest = int((of_trainers_H + of_workers_H).argmax())
    shared = float((of_trainers_H + of_workers_H)[fullest]) / hosts.cores
    seconds = {
        TRAINERS: trainer,
        WORKERS: float(seconds_W.max()),
        NETWORK: float(max(out_H.max(), in_H.max())) / hosts.bytes_per_second,
    }
    alone = sum(seconds.values()) if demand.config.train.update == "sync" else max(seconds.values())
    limit = max(seconds, key=lambda name: seconds[name])
    if shared > alone:  # roles wait for cores of their host: those that take more of them limit
        limit = TRAINERS if of_trainers_H[fullest] >= of_workers_H[fullest] else WORKERS
    step_seconds = max(shared, alone) / costs.busy
    trainer_bytes, bytes_W = _memory(demand, costs)
    return Forecast(
        links=_links(demand, hosts.count) | ({"host -> host": crossing} if hosts.count > 1 else {}),
        trainer_bytes=trainer_bytes,
        worker_bytes=float(bytes_W.max()),
        host_bytes=float((trainer_bytes * dealt.trainers_H + dealt.of_workers(bytes_W)).max()),
        seconds=seconds | {"cores of a host": shared},
        limit=limit,
        reasons=_reasons(demand, costs, limit, int(seconds_W.argmax())),
        step_seconds=step_seconds,
        samples_per_second=demand.config.train.batch_size / step_seconds if step_seconds else math.inf,
    )


def _links(demand: Demand, hosts: int) -> dict[str, Link]:
    trainers, parts = demand.cluster.trainers, demand.config.train.micro_batches
    count = messages(demand.config, hosts).total
    up, down_W = parts * float(demand.traffic.up_bytes_W.sum()), parts * demand.traffic.down_bytes_W
    links = {
        "trainer -> worker": Link(count, trainers * up, up),
        "worker -> trainer": Link(count, trainers * float(down_W.sum()), trainers * float(down_W.max())),
    }
    if rounds := demand.trainer["gloo_round"]:
        sent = demand.trainer["gloo_byte"]
        links["trainer -> trainer"] = Link(int(trainers * rounds), trainers * sent, sent)
    return links


def _between_hosts(
    demand: Demand, dealt: _Dealt
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], Link]:
    """Bytes that leave each host and that reach it in a step, and all of these together."""
    parts, elsewhere_H = demand.config.train.micro_batches, dealt.trainers - dealt.trainers_H
    up_W, down_W = parts * demand.traffic.up_bytes_W, parts * demand.traffic.down_bytes_W
    up_H, down_H = dealt.of_workers(up_W), dealt.of_workers(down_W)
    ring_H = dealt.trainers_H * (gradient_bytes(dealt.trainers, demand.dense) if dealt.hosts > 1 else 0.0)
    out_H = dealt.trainers_H * (up_W.sum() - up_H) + elsewhere_H * down_H + ring_H
    in_H = dealt.trainers_H * (down_W.sum() - down_H) + elsewhere_H * up_H + ring_H
    # Pairs of one host aside; there and back are two.
    workers_H = dealt.of_workers(np.ones(dealt.workers))
    share = 1 - float(dealt.trainers_H @ workers_H) / (dealt.trainers * dealt.workers)
    rounds = int(dealt.trainers * demand.trainer["gloo_round"]) if dealt.hosts > 1 else 0
    count = round(2 * share * messages(demand.config, dealt.hosts).total) + rounds
    return out_H, in_H, Link(count, float(out_H.sum()), float(out_H.max()))


def _memory(demand: Demand, costs: Costs) -> tuple[float, npt.NDArray[np.float64]]:
    """Bytes of a trainer, and of each worker with its rows."""
    # The parameters, their gradients, and two values more for the optimizer.
    dense = 4 * BYTES_PER_GRADIENT * demand.dense.parameters
    rows_W = np.zeros(demand.cluster.workers)
    for shard in demand.placement.shards:
        rows_W[shard.worker] += shard.num_bytes
        table = shard.table
        if demand.config.train.update == "pipelined" and table.optimizer.steps_all_rows:
            # Its rows as they were before the last step of a call (pre_update_rows.py).
            rows_W[shard.worker] += shard.num_rows * table.dim * table.bytes_per_value
    beside_W = np.array([cost(costs.worker_bytes, terms) for terms in demand.workers])
    return cost(costs.trainer_bytes, demand.trainer) + dense, rows_W + beside_W


def _reasons(demand: Demand, costs: Costs, limit: str, slowest: int) -> Terms:
    if limit == NETWORK:
        return {}
    coefficients, terms = {
        TRAINERS: (costs.trainer_seconds, demand.trainer),
        WORKERS: (costs.worker_seconds, demand.workers[slowest]),
    }[limit]
    total = cost(coefficients, terms)
    return {term: value * terms[term] / total for term, value in coefficients.items()} if total else {}

"""Times the forms of the dense net beside plain DDP: ``PYTHONPATH=tests python -m support.bench_parallel``.

Every form trains on the same number of samples a step. Rounds go through all forms in turn, since the
machine changes in the course of minutes; CPU-seconds are of all processes of the cluster. ``--wide`` takes a
net so large that its memory shows, and few samples.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from functools import partial

import psutil
from rich.console import Console
from rich.table import Table
from support.cluster import running_cluster
from support.workloads import SPEC, batches, dlrm_config

from hybrid.config import RunConfig
from workers.bootstrap import Cluster
from workers.session import Session

WARM_UP_STEPS = 10
FORMS: dict[str, RunConfig] = {
    "plain DDP, 2 trainers": dlrm_config(2),
    "2 replicas in each of 2 trainers": dlrm_config(2, parallel="replicas", devices=("cpu", "cpu")),
    "script, 2 trainers": dlrm_config(2, compile="script"),
    "inductor, 2 trainers": dlrm_config(2, compile="inductor"),
    "plain DDP, 4 trainers": dlrm_config(4),
    "2 x 2 mesh, 4 trainers": dlrm_config(4, parallel="tensor", tensor_size=2),
}
_WIDE = {"top_mlp": (8192, 4096), "optimizer": "Adam", "learning_rate": 1e-4}
WIDE_FORMS = {
    "plain DDP, 4 trainers": dlrm_config(4, **_WIDE),
    "2 x 2 mesh, 4 trainers": dlrm_config(4, parallel="tensor", tensor_size=2, **_WIDE),
    "1 x 4 mesh, 4 trainers": dlrm_config(4, parallel="tensor", tensor_size=4, **_WIDE),
}


@dataclass(frozen=True)
class Timing:
    """What one round of a form gave.

    Attributes:
        trainer_mib: memory of a trainer's process that it shares with no other.
        losses: of a few steps, which all forms with the same trainers have alike.
    """

    samples_per_second: float
    cpu_seconds_per_million: float
    trainer_mib: float
    losses: tuple[float, ...]


def timed(cluster: Cluster, config: RunConfig, num_steps: int, global_size: int) -> Timing:
    """Train for some steps; runs in the master's process."""
    make = partial(batches, global_size, config.cluster.trainers)
    session = Session(cluster.topology, config, SPEC, WARM_UP_STEPS + num_steps)
    warm = session.train_on(partial(make, WARM_UP_STEPS), 0)
    processes = [psutil.Process(), *(psutil.Process(m.pid) for m in cluster.members.values())]
    before, start = sum(map(_cpu_seconds, processes)), time.perf_counter()
    reports = session.train_on(partial(make, num_steps), WARM_UP_STEPS)
    seconds = time.perf_counter() - start
    cpu_seconds = sum(map(_cpu_seconds, processes)) - before
    memory = psutil.Process(cluster.members[cluster.topology.trainers[0]].pid).memory_full_info().uss
    session.close()
    samples = num_steps * global_size
    losses = [sum(r.losses[step] for r in warm) for step in (0, 1, 9)]
    losses.append(sum(r.losses[-1] for r in reports))
    return Timing(samples / seconds, cpu_seconds / samples * 1e6, memory / 2**20, tuple(losses))


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", default="", help="forms whose name holds this")
    parser.add_argument("--batch-size", type=int, default=4096, help="samples of a step")
    parser.add_argument("--wide", action="store_true", help="a net whose memory shows")
    arguments = parser.parse_args()
    chosen = WIDE_FORMS if arguments.wide else FORMS
    forms = {name: config for name, config in chosen.items() if arguments.only in name}
    timings: dict[str, list[Timing]] = {name: [] for name in forms}
    for _ in range(arguments.rounds):
        for name, config in forms.items():
            with running_cluster(config) as cluster:
                timings[name].append(cluster.run(timed, config, arguments.steps, arguments.batch_size))
    Console(width=200).print(_table(timings))


def _table(timings: dict[str, list[Timing]]) -> Table:
    table = Table("form", "samples/s", "all rounds", "CPU-s per million", "MiB of a trainer", "losses")
    for name, rounds in timings.items():
        table.add_row(
            name,
            f"{statistics.median(t.samples_per_second for t in rounds):,.0f}",
            " ".join(f"{t.samples_per_second:,.0f}" for t in rounds),
            f"{statistics.median(t.cpu_seconds_per_million for t in rounds):.1f}",
            f"{statistics.median(t.trainer_mib for t in rounds):.0f}",
            " ".join(f"{loss:.5f}" for loss in rounds[0].losses),
        )
    return table


if __name__ == "__main__":
    main()

"""This project: trains the job of this process on a cluster of this machine."""

import json
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmark.batch_session import BatchSession
from benchmark.gpu_trace import traced
from benchmark.job import Job
from benchmark.workloads import WORKLOADS
from hybrid.batch import Batch
from hybrid.config import RunConfig
from hybrid.config.loading import load_config
from hybrid.security.secret import Secret
from hybrid.storage.private_files import choose_compile_cache
from hybrid.topology import MASTER, Role, Topology
from workers.launching.fork_server import ForkServer
from workers.rendezvous.bootstrap import announce_stop, lead, serve
from workers.rendezvous.host_setup import MasterAddress

_TRACED_STEPS = 10
_SECONDS = 3600.0


def main() -> None:
    """Run every role in its own process; the arguments are values of keys, such as ``train.update=sync``."""
    choose_compile_cache()
    config, secret = load_config(Path("config.toml"), sys.argv[1:]), Secret.fresh()
    with ForkServer(("torch._dynamo", "benchmark.ours")) as server:
        calls = {str(role): (role, config, secret) for role in config.cluster.topology.roles}
        server.start(run_role, calls)
        while calls and (end := server.event(_SECONDS)) is not None:
            del calls[end.name]
            if end.exit_code:
                sys.exit(f"{end.name} ended with code {end.exit_code}")


def run_role(
    role: Role, config: RunConfig, secret: Secret, listener: socket.socket, report: Callable[[Any], object]
) -> None:
    """Run a role in its process."""
    if role != MASTER:
        with listener:
            address = MasterAddress(*listener.getsockname())
        serve(role, address, secret)
        return
    with lead(config, secret, listener) as cluster:
        train_job(cluster.topology, config)
        announce_stop(cluster)


def train_job(topology: Topology, config: RunConfig) -> None:
    """Train the job of this process on the cluster."""
    job = Job.from_environment()
    input_spec, num_steps = job.workload.input_spec, job.num_warm_up + job.num_steps
    hotness = float(job.workload.hotness)
    trainers = config.cluster.trainers
    ids_per_sample = {each.name: hotness for each in input_spec.sparse_features if each.multi_hot}
    session = BatchSession(topology, config, input_spec, num_steps, ids_per_sample=ids_per_sample)

    def train(steps: range) -> list[float]:
        select = partial(select_batches, job.workload_name, trainers, steps)
        reports = session.train_on(select, steps.start, is_aligned=True)
        return [sum(losses) for losses in zip(*(each.losses for each in reports), strict=True)]

    job.measure(train)
    if config.dense.device != "cpu":
        of_trainers = [Path(f"{job.result}-{index}") for index in range(trainers)]
        steps = range(num_steps, num_steps + _TRACED_STEPS)
        num_ahead = 0 if config.train.update == "sync" else 2
        trace = partial(trace_batches, job.workload_name, trainers, steps, num_ahead, of_trainers)
        session.train_on(trace, num_steps, is_aligned=True)
        job.add_result("gpu", [json.loads(each.read_text(encoding="utf-8")) for each in of_trainers])
    session.close()


def select_batches(workload_name: str, trainers: int, steps: range, trainer: int) -> list[Batch]:
    """Return a trainer's batches for some steps; global ones unless ``trainers`` is as in the workload."""
    batches = _make_batches(workload_name, trainers, trainer)
    return [batches[step % len(batches)] for step in steps]


def trace_batches(
    workload_name: str, trainers: int, steps: range, num_ahead: int, files: Sequence[Path], trainer: int
) -> Iterator[Batch]:
    """Yield the batches of a trainer for some steps, and write a summary of their trace to its file."""
    return traced(select_batches(workload_name, trainers, steps, trainer), num_ahead, files[trainer])


@cache  # the timed steps have the batches of the warm-up
def _make_batches(workload_name: str, trainers: int, trainer: int) -> list[Batch]:
    workload = WORKLOADS[workload_name]
    return workload.batches(trainer) if trainers == workload.trainers else workload.global_batches()

"""This project, started by ``hybrid run benchmark.ours:measure``."""

import time
from functools import partial
from itertools import cycle, islice

from benchmark import mark
from benchmark.job import Job
from benchmark.workloads import Workload
from hybrid.batch import Batch
from hybrid.config import RunConfig
from hybrid.topology import Topology
from workers.controller.session import Session


def measure(topology: Topology, config: RunConfig) -> None:
    """Train a workload on the cluster: warm-up steps, then timed steps."""
    job = Job.from_environment()
    of, total_steps = job.workload, job.num_warm_up + job.num_steps
    session = Session(topology, config, of.input_spec, total_steps, ids_per_sample=of.ids_per_sample)
    reports = [session.train_on(partial(batches, job.workload, 0, job.num_warm_up), 0)]
    mark.begin()
    start = time.perf_counter()
    reports.append(
        session.train_on(partial(batches, job.workload, job.num_warm_up, job.num_steps), job.num_warm_up)
    )
    seconds = time.perf_counter() - start
    losses = [sum(parts) for part in reports for parts in zip(*(r.losses for r in part), strict=True)]
    mark.end(seconds, losses)
    session.close()


def batches(workload: Workload, first_step: int, num_steps: int, trainer: int) -> list[Batch]:
    """Return the batches of a trainer for some steps."""
    return list(islice(cycle(workload.batches(trainer)), first_step, first_step + num_steps))

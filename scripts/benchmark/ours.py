"""This project, started by ``hybrid run benchmark.ours:train_job``."""

from functools import cache, partial

from benchmark.job import Job
from benchmark.workloads import WORKLOADS
from hybrid.batch import Batch
from hybrid.config import RunConfig
from hybrid.topology import Topology
from workers.controller.session import Session


def train_job(topology: Topology, config: RunConfig) -> None:
    """Train the job of this process on the cluster."""
    job = Job.from_environment()
    input_spec, num_steps = job.workload.input_spec, job.num_warm_up + job.num_steps
    hotness = float(job.workload.hotness)
    ids_per_sample = {each.name: hotness for each in input_spec.sparse_features if each.multi_hot}
    session = Session(topology, config, input_spec, num_steps, ids_per_sample=ids_per_sample)

    def train(steps: range) -> list[float]:
        reports = session.train_on(partial(select_batches, job.workload_name, steps), steps.start)
        return [sum(losses) for losses in zip(*(each.losses for each in reports), strict=True)]

    job.measure(train)
    session.close()


def select_batches(workload_name: str, steps: range, trainer: int) -> list[Batch]:
    """Return the batches of a trainer for some steps."""
    batches = _make_batches(workload_name, trainer)
    return [batches[step % len(batches)] for step in steps]


@cache  # the timed steps have the batches of the warm-up
def _make_batches(workload_name: str, trainer: int) -> list[Batch]:
    return WORKLOADS[workload_name].batches(trainer)

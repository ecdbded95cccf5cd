"""Points of the scaling bench as they would be measured where some costs are the truth."""

import math
import statistics

from benchmark.fitting import Sample
from benchmark.results import Measurement
from benchmark.scaling import Point

from workers.planning.costs import Costs, cost
from workers.planning.forecast import Hosts, forecast

CORES = 2


def sampled(of: Point, costs: Costs, slower: float = 1.0) -> Sample:
    """A point as it would be measured, in ten steps that are so many times slower than ``costs`` say."""
    asked, steps = of.demand, 10
    w = of.workload
    seconds = forecast(asked, costs, Hosts(1, CORES, math.inf, math.inf)).step_seconds * slower
    used = {
        "trainer": w.trainers * cost(costs.trainer_seconds, asked.trainer),
        "worker": sum(cost(costs.worker_seconds, terms) for terms in asked.workers),
    }
    tables = sum(shard.num_bytes for shard in asked.placement.shards) / w.workers
    beside = statistics.fmean(cost(costs.worker_bytes, terms) for terms in asked.workers)
    memory = {"trainer": cost(costs.trainer_bytes, asked.trainer), "worker": tables + beside}
    measured = Measurement(
        w.name,
        of.system.name,
        1,
        steps * w.global_batch,
        steps * seconds,
        {role: steps * value for role, value in used.items()},
        memory,
        (),
    )
    return Sample(asked, measured)

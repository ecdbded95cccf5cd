"""From what steps have cost to the coefficients that ``hybrid plan`` forecasts by."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmark.results import Measurement
from benchmark.tables import TextTable, times
from workers.planning.costs import TRAINER_MEMORY_TERMS, WORKER_MEMORY_TERMS, Costs, cost
from workers.planning.demand import TRAINER_TERMS, WORKER_TERMS, Demand, Terms
from workers.planning.forecast import Hosts, forecast

_FLAT = 1e-10
AIM = 0.2  # how far a prediction may be off


@dataclass(frozen=True)
class Sample:
    """A point, what a step of it asks for, and what it has cost."""

    demand: Demand
    measured: Measurement

    @property
    def step_seconds(self) -> float:
        return self.measured.seconds / self._steps

    @property
    def trainer_seconds(self) -> float:
        """CPU-seconds of one trainer in a step."""
        return self.measured.cpu_seconds["trainer"] / self._steps / self.demand.cluster.trainers

    @property
    def worker_seconds(self) -> float:
        """CPU-seconds of the mean worker in a step."""
        return self.measured.cpu_seconds["worker"] / self._steps / self.demand.cluster.workers

    @property
    def worker(self) -> Terms:
        """Terms of the mean worker."""
        return {term: statistics.fmean(w[term] for w in self.demand.workers) for term in WORKER_TERMS}

    @property
    def _steps(self) -> float:
        return self.measured.num_samples / self.demand.config.train.batch_size


def fit(samples: Sequence[Sample], origin: str, cores: int) -> Costs:
    """The coefficients that come nearest to all samples, in proportion to what each has cost.

    Args:
        origin: processor and date of the measurement.
        cores: that all roles have shared.
    """
    workers = [sample.worker for sample in samples]
    trainers = [sample.demand.trainer for sample in samples]
    rows = [sum(s.num_bytes for s in x.demand.placement.shards) / x.demand.cluster.workers for x in samples]
    beside = [
        max(0.0, x.measured.memory_bytes["worker"] - held) for x, held in zip(samples, rows, strict=True)
    ]
    costs = Costs(
        origin,
        1.0,
        _fit(TRAINER_TERMS, trainers, [s.trainer_seconds for s in samples]),
        _fit(WORKER_TERMS, workers, [s.worker_seconds for s in samples]),
        _fit(TRAINER_MEMORY_TERMS, trainers, [s.measured.memory_bytes["trainer"] for s in samples]),
        _fit(WORKER_MEMORY_TERMS, workers, beside),
    )
    busy = statistics.median(
        forecast(s.demand, costs, _this_machine(cores)).step_seconds / s.step_seconds for s in samples
    )
    return dataclasses.replace(costs, busy=min(1.0, busy))


def _fit(names: Sequence[str], terms: Sequence[Terms], measured: Sequence[float]) -> Terms:
    used = [(each, value) for each, value in zip(terms, measured, strict=True) if value > 0]
    matrix_PT = np.array([[each[name] / value for name in names] for each, value in used])
    found = non_negative_least_squares(matrix_PT, np.ones(len(used)))
    return dict(zip(names, found.tolist(), strict=True))


def non_negative_least_squares(
    matrix_PT: npt.NDArray[np.float64], values_P: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The x, nowhere negative, that brings ``matrix_PT @ x`` nearest to ``values_P``.

    By the active set method of Lawson and Hanson (1974, chapter 23). What no row depends on stays 0.
    """
    scale_T = np.linalg.norm(matrix_PT, axis=0)
    scaled_PT = matrix_PT / np.where(scale_T, scale_T, 1.0)
    x_T, is_free_T = np.zeros(len(scale_T)), np.zeros(len(scale_T), bool)
    while True:
        slope_T = np.where(is_free_T, 0.0, scaled_PT.T @ (values_P - scaled_PT @ x_T))
        if slope_T.max(initial=0.0) < _FLAT:
            return x_T / np.where(scale_T, scale_T, 1.0)
        is_free_T[slope_T.argmax()] = True
        while (best_T := _least_squares(scaled_PT, values_P, is_free_T))[is_free_T].min() <= 0:
            falling_T = is_free_T & (best_T <= 0)
            x_T += (x_T[falling_T] / (x_T - best_T)[falling_T]).min() * (best_T - x_T)
            is_free_T &= x_T > _FLAT
        x_T = best_T


def _least_squares(
    matrix_PT: npt.NDArray[np.float64], values_P: npt.NDArray[np.float64], is_free_T: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """The best x, signs aside, of which only the free entries are not 0."""
    x_T = np.zeros(len(is_free_T))
    x_T[is_free_T] = np.linalg.lstsq(matrix_PT[:, is_free_T], values_P)[0]
    return x_T


def prediction_table(samples: Sequence[Sample], costs: Costs, cores: int) -> TextTable:
    """What was foretold of points that were not fitted to, over what was measured; the worst last."""
    header = ("point", "samples/s", "foretold", "foretold / measured", "CPU of trainers", "CPU of workers")
    rows = []
    for sample in samples:
        rate = forecast(sample.demand, costs, _this_machine(cores)).samples_per_second
        speed = rate / sample.measured.samples_per_second
        trainer = cost(costs.trainer_seconds, sample.demand.trainer) / sample.trainer_seconds
        worker = cost(costs.worker_seconds, sample.worker) / sample.worker_seconds
        rates = (f"{each:,.0f}" for each in (sample.measured.samples_per_second, rate))
        cells = (*rates, *map(times, (speed, trainer, worker)))
        rows.append((abs(math.log(speed)), (sample.measured.workload, *cells)))
    rows.sort(key=lambda row: row[0])
    near = sum(off <= math.log(1 + AIM) for off, _ in rows)
    title = f"Points that were not fitted to: {near} of {len(rows)} within {AIM:.0%}, the worst last"
    return TextTable(title, header, [cells for _, cells in rows])


def _this_machine(cores: int) -> Hosts:
    """One host, whose memory and network are no limit."""
    return Hosts(1, cores, math.inf, math.inf)

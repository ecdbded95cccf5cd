"""Measurements and summaries: medians, ratios, losses that must agree. Does not import torch."""

import dataclasses
import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Of the size of a loss: five digits. Rounding comes to 1e-6 after hundreds of steps; rows that move twice as
# far, to 2e-4 after ten of W2. Of W1 and W3 it is 1e-5 or less: in so few steps their losses hardly depend on
# the tables.
LOSS_TOLERANCE = 1e-5
# In bfloat16 the gradients of weights are rounded to eight bits, for all samples that are computed together:
# one process and two trainers are 1e-4 apart after ten steps of W2, 4e-4 of W3. Those that cut batches alike
# agree to 1e-6 all the same, so that a wrong table shows.
BFLOAT16_LOSS_TOLERANCE = 1e-3
LOSS_STEPS = (1, 2, 3, 10)  # and the last


@dataclass(frozen=True)
class Measurement:
    """One round of one system on one workload.

    Attributes:
        number: of the round, from 1; systems are compared within a round.
        num_samples, seconds: of the timed steps, over all trainers.
        cpu_seconds: of the timed steps, by role; what plays none is "other".
        memory_bytes: after the timed steps, of one process of each role: what it shares with no other.
        losses: of all steps, the warm-up's first.
        in_bfloat16: whether dense nets computed in that.
        parts: in how many parts it computed the samples of a step.
    """

    workload: str
    system: str
    number: int
    num_samples: int
    seconds: float
    cpu_seconds: dict[str, float]
    memory_bytes: dict[str, float]
    losses: tuple[float, ...]
    in_bfloat16: bool = False
    parts: int = 1

    @property
    def samples_per_second(self) -> float:
        return self.num_samples / self.seconds

    @property
    def cpu_seconds_per_million(self) -> float:
        """CPU-seconds of all processes per million samples."""
        return self.of_a_million(sum(self.cpu_seconds.values()))

    def of_a_million(self, seconds: float) -> float:
        """Seconds of the timed steps per million samples."""
        return seconds / self.num_samples * 1e6

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and derived values, for JSON."""
        rates = {
            "samples_per_second": self.samples_per_second,
            "cpu_seconds_per_million": self.cpu_seconds_per_million,
        }
        return dataclasses.asdict(self) | rates


@dataclass(frozen=True)
class Failure:
    """A failed measurement of a system on a workload."""

    workload: str
    system: str
    message: str


@dataclass(frozen=True)
class Summary:
    """All rounds of one system on one workload.

    Attributes:
        samples_per_second, cpu_seconds_per_million: medians over the rounds.
        rounds: samples a second of each round.
        ratios: by baseline, the median over rounds of the system's samples a second over the baseline's
            in the same round. A baseline without a round in common is left out.
        memory_bytes: median over rounds, of one process of each role.
        losses: of the first round, by step; see :func:`losses_by_step`.
    """

    workload: str
    system: str
    samples_per_second: float
    cpu_seconds_per_million: float
    rounds: tuple[float, ...]
    ratios: dict[str, float]
    memory_bytes: dict[str, float]
    losses: dict[str, float]


@dataclass(frozen=True)
class Disagreement:
    """A loss of a synchronous system that differs from that of the reference."""

    workload: str
    system: str
    number: int
    step: str
    loss: float
    reference: str
    expected: float
    tolerance: float

    def __str__(self) -> str:
        step = f"step {self.step}" if self.step.isdigit() else f"the {self.step} step"
        return (
            f"{self.workload}, {self.system}, round {self.number}: loss {self.loss:.6f} at {step} "
            f"is not {self.expected:.6f}, that of {self.reference}, to {self.tolerance:g} of its size"
        )


def split(results: Iterable[Measurement | Failure]) -> tuple[list[Measurement], list[Failure]]:
    """Split results into measurements and failures."""
    measurements: list[Measurement] = []
    failures: list[Failure] = []
    for result in results:
        if isinstance(result, Failure):
            failures.append(result)
        else:
            measurements.append(result)
    return measurements, failures


def losses_by_step(losses: Sequence[float]) -> dict[str, float]:
    """Return the losses that are compared: at steps 1, 2, 3, 10 and the last."""
    early = {str(step): losses[step - 1] for step in LOSS_STEPS if step < len(losses)}
    return early | {"last": losses[-1]}


def summarise(measurements: Sequence[Measurement], baselines: Iterable[str]) -> list[Summary]:
    """Return a summary for each workload and system, in the order of their first rounds."""
    pairs = dict.fromkeys((m.workload, m.system) for m in measurements)
    by_pair = {pair: _rounds(measurements, *pair) for pair in pairs}
    return [
        _summary(rounds, {b: by_pair[workload, b] for b in baselines if (workload, b) in by_pair})
        for (workload, _), rounds in by_pair.items()
    ]


def _rounds(measurements: Sequence[Measurement], workload: str, system: str) -> dict[int, Measurement]:
    return {m.number: m for m in measurements if (m.workload, m.system) == (workload, system)}


def _summary(rounds: dict[int, Measurement], baselines: dict[str, dict[int, Measurement]]) -> Summary:
    first = next(iter(rounds.values()))
    ratios = {name: ratio for name, of in baselines.items() if (ratio := _ratio(rounds, of)) is not None}
    return Summary(
        workload=first.workload,
        system=first.system,
        samples_per_second=statistics.median(m.samples_per_second for m in rounds.values()),
        cpu_seconds_per_million=statistics.median(m.cpu_seconds_per_million for m in rounds.values()),
        rounds=tuple(m.samples_per_second for m in rounds.values()),
        ratios=ratios,
        memory_bytes={
            role: statistics.median(m.memory_bytes.get(role, 0.0) for m in rounds.values())
            for role in first.memory_bytes
        },
        losses=losses_by_step(first.losses),
    )


def _ratio(rounds: dict[int, Measurement], baseline: dict[int, Measurement]) -> float | None:
    ratios = [
        m.samples_per_second / baseline[number].samples_per_second
        for number, m in rounds.items()
        if number in baseline
    ]
    return statistics.median(ratios) if ratios else None


def disagreements(
    measurements: Sequence[Measurement], synchronous: Sequence[str], reference: str
) -> list[Disagreement]:
    """Return the wrong losses of synchronous systems.

    All of them do the same arithmetic up to rounding. In every round, at steps 1, 2, 3, 10 and the
    last, a loss may differ from that of the reference by ``LOSS_TOLERANCE`` of its size at most; one that
    is not finite agrees with nothing, not even itself. In bfloat16 it may differ by
    ``BFLOAT16_LOSS_TOLERANCE``, but not from the first that computes the samples of a step in as many parts.

    Args:
        synchronous: names of the systems that are held to this.
        reference: whose first round is right; where it was not measured on a workload, the first
            synchronous system that was.
    """
    found: list[Disagreement] = []
    for workload in dict.fromkeys(m.workload for m in measurements):
        held = [m for m in measurements if m.workload == workload and m.system in synchronous]
        if not held:
            continue
        right = next((m for m in held if m.system == reference), held[0])
        for m in held:
            if m.in_bfloat16:
                alike = right if m.parts == right.parts else next(h for h in held if h.parts == m.parts)
                found += _compare(m, right, BFLOAT16_LOSS_TOLERANCE)
                found += _compare(m, alike, LOSS_TOLERANCE)
            else:
                found += _compare(m, right, LOSS_TOLERANCE)
    return found


def _compare(measured: Measurement, right: Measurement, tolerance: float) -> Iterable[Disagreement]:
    losses = losses_by_step(measured.losses)
    for step, expected in losses_by_step(right.losses).items():
        loss = losses[step]
        is_close = math.isfinite(expected) and abs(loss - expected) <= tolerance * abs(expected)
        if not is_close:
            yield Disagreement(
                measured.workload,
                measured.system,
                measured.number,
                step,
                loss,
                right.system,
                expected,
                tolerance,
            )


def failed_systems(found: Collection[Disagreement], workload: str) -> set[str]:
    """Return the systems whose losses are wrong on a workload."""
    return {d.system for d in found if d.workload == workload}

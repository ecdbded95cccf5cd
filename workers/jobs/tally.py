"""What a run has counted so far: part of every checkpoint, so that a resumed run goes on counting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from hybrid.clock import PHASES
from hybrid.errors import CheckpointError
from hybrid.metrics import binary_metrics
from hybrid.update import Staleness
from workers.jobs.saving import Progress
from workers.trainer import Report


@dataclass
class Interval:
    """The steps since the last line of progress.

    Attributes:
        seconds: that trainers took for them.
        reports: of each trainer, for all of these steps. After a resume with another number of trainers,
            only the first ones have taken all.
        staleness: of the updates of tables; None where it is zero by design.
    """

    seconds: float = 0.0
    reports: list[Report] = field(default_factory=list)
    staleness: Staleness | None = None

    def add(self, reports: Sequence[Report], seconds: float, staleness: Staleness | None) -> None:
        """Count some further steps."""
        self.seconds += seconds
        pairs = zip_longest(self.reports, reports)
        self.reports = [_joined(before, after) for before, after in pairs]
        if staleness is not None:
            self.staleness = staleness + (self.staleness or Staleness())

    @property
    def num_steps(self) -> int:
        return len(self.reports[0].losses)

    @property
    def num_samples(self) -> int:
        return sum(len(report.labels) for report in self.reports)

    @property
    def loss(self) -> float:
        """Mean over the steps."""
        return sum(sum(report.losses) for report in self.reports) / self.num_steps

    @property
    def auc(self) -> float:
        """Over all samples, each by the logit that it had before the update of its own step."""
        logits_N = torch.cat([report.logits for report in self.reports])
        return binary_metrics(logits_N, torch.cat([report.labels for report in self.reports])).auc

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Mean over the trainers."""
        return {p: sum(r.phase_seconds[p] for r in self.reports) / len(self.reports) for p in PHASES}


def _joined(before: Report | None, after: Report | None) -> Report:
    """One trainer's reports of steps before and after as one; it may have only one of them."""
    if before is None or after is None:
        only = before or after
        assert only is not None
        return only
    return Report(
        before.losses + after.losses,
        torch.cat([before.logits, after.logits]),
        torch.cat([before.labels, after.labels]),
        {phase: before.phase_seconds[phase] + after.phase_seconds[phase] for phase in PHASES},
        before.skipped_steps + after.skipped_steps,
    )


@dataclass
class Tally:
    """Counts what a run does.

    Attributes:
        samples: trained.
        seconds: that trainers took for them.
        skipped_steps: see :class:`workers.trainer.Report`.
        interval: the steps since the last line of progress.
    """

    samples: int = 0
    seconds: float = 0.0
    skipped_steps: int = 0
    interval: Interval = field(default_factory=Interval)

    def add(self, reports: Sequence[Report], seconds: float, staleness: Staleness | None) -> None:
        """Count some further steps."""
        self.samples += sum(len(report.labels) for report in reports)
        self.seconds += seconds
        self.skipped_steps += reports[0].skipped_steps  # the same on every trainer
        self.interval.add(reports, seconds, staleness)

    def pack(self) -> Progress:
        """It as a checkpoint holds it."""
        interval = self.interval
        staleness = interval.staleness
        values = {
            "samples": self.samples,
            "seconds": self.seconds,
            "skipped_steps": self.skipped_steps,
            "interval_seconds": interval.seconds,
            "interval_staleness": staleness and [staleness.count, staleness.total, staleness.largest],
            "interval_skipped_steps": [report.skipped_steps for report in interval.reports],
            "interval_phase_seconds": [report.phase_seconds for report in interval.reports],
        }
        tensors: dict[str, Tensor] = {}
        for index, report in enumerate(interval.reports):
            tensors[f"losses.{index}"] = torch.tensor(report.losses, dtype=torch.float64)
            tensors[f"logits.{index}"] = report.logits
            tensors[f"labels.{index}"] = report.labels
        return Progress(values, tensors)

    @classmethod
    def unpack(cls, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tally:
        """The inverse of :meth:`pack`; nothing counted where there is nothing.

        Raises:
            CheckpointError: this is nothing that :meth:`pack` gives.
        """
        try:
            return cls._unpack(values, tensors)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the progress in the checkpoint is none ({error!r})") from error

    @classmethod
    def _unpack(cls, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tally:
        if not values:
            return cls()
        skipped, phases = values["interval_skipped_steps"], values["interval_phase_seconds"]
        reports = [
            Report(
                tensors[f"losses.{i}"].tolist(),
                tensors[f"logits.{i}"],
                tensors[f"labels.{i}"],
                phases[i],
                skipped[i],
            )
            for i in range(len(skipped))
        ]
        staleness = values["interval_staleness"]
        interval = Interval(values["interval_seconds"], reports, staleness and Staleness(*staleness))
        return cls(values["samples"], values["seconds"], values["skipped_steps"], interval)

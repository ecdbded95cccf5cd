"""What a run has counted so far; a part of every checkpoint, so that a resumed run continues the counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybrid.config import TaskSection
from hybrid.errors import CheckpointError
from hybrid.metrics import score
from hybrid.primitives.step_timings import PHASES
from hybrid.protocol.update_rules import Staleness
from workers.controller.deployment import Counted
from workers.controller.remote_trainer import TrainerReport
from workers.controller.session import Session


@dataclass
class Interval:
    """The steps since the last log step.

    Attributes:
        seconds: that trainers took for them.
        parts: the reports of each trainer, one per call. After a resume with another number of trainers,
            only the first ones have taken all of these steps.
        staleness: of the table updates; None in modes without staleness.
    """

    seconds: float = 0.0
    parts: list[list[TrainerReport]] = field(default_factory=list)
    staleness: Staleness | None = None

    def add(self, reports: Sequence[TrainerReport], seconds: float) -> None:
        """Add further steps."""
        self.seconds += seconds
        self.parts += [[] for _ in reports[len(self.parts) :]]
        for parts, report in zip(self.parts, reports, strict=False):
            parts.append(report)

    @property
    def _all_reports(self) -> list[TrainerReport]:
        return [report for parts in self.parts for report in parts]

    @property
    def num_steps(self) -> int:
        return sum(len(report.losses) for report in self.parts[0])

    @property
    def num_samples(self) -> int:
        return sum(len(report.labels) for report in self._all_reports)

    @property
    def loss(self) -> float:
        """Mean over the steps."""
        losses = (sum(loss for report in parts for loss in report.losses) for parts in self.parts)
        return sum(losses) / self.num_steps

    def score(self, task: TaskSection) -> float:
        """Score of the first task over all samples, each as predicted before the update of its step."""
        labels_N = torch.cat([report.labels for report in self._all_reports])
        counts_N = ~labels_N.isnan()
        outputs_N = torch.cat([report.outputs for report in self._all_reports])[counts_N]
        return score(task, outputs_N, labels_N[counts_N])

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Mean over the trainers."""
        return {p: sum(r.phase_seconds[p] for r in self._all_reports) / len(self.parts) for p in PHASES}

    @property
    def reports(self) -> list[TrainerReport]:
        """One report of each trainer, for all of these steps."""
        return [
            TrainerReport(
                [loss for part in parts for loss in part.losses],
                torch.cat([part.outputs for part in parts]),
                torch.cat([part.labels for part in parts]),
                {phase: sum(part.phase_seconds[phase] for part in parts) for phase in PHASES},
                sum(part.skipped_steps for part in parts),
            )
            for parts in self.parts
        ]


@dataclass
class Tally:
    """The counts of a run.

    Attributes:
        samples: number of training samples.
        seconds: that trainers took for them.
        skipped_steps: see :class:`workers.controller.remote_trainer.TrainerReport`.
        interval: the steps since the last log step.
    """

    samples: int = 0
    seconds: float = 0.0
    skipped_steps: int = 0
    interval: Interval = field(default_factory=Interval)

    def add(self, reports: Sequence[TrainerReport], seconds: float) -> None:
        """Add further steps."""
        self.samples += sum(len(report.labels) for report in reports)
        self.seconds += seconds
        self.skipped_steps += reports[0].skipped_steps  # the same on every trainer
        self.interval.add(reports, seconds)

    def count_staleness(self, session: Session, step: int) -> None:
        """Add the staleness of all updates before ``step``, the next step; before each use of the value.

        It may wait for the last updates, so it is not counted with each call of the trainers.
        """
        if session.config.train.update != "sync":
            staleness = self.interval.staleness or Staleness()
            self.interval.staleness = staleness + session.take_staleness(step)

    def pack(self) -> Counted:
        """Return the counts as a checkpoint stores them."""
        interval = self.interval
        reports, staleness = interval.reports, interval.staleness
        values = {
            "samples": self.samples,
            "seconds": self.seconds,
            "skipped_steps": self.skipped_steps,
            "interval_seconds": interval.seconds,
            "interval_staleness": staleness and [staleness.count, staleness.total, staleness.largest],
            "interval_skipped_steps": [report.skipped_steps for report in reports],
            "interval_phase_seconds": [report.phase_seconds for report in reports],
        }
        tensors: dict[str, Tensor] = {}
        for index, report in enumerate(reports):
            tensors[f"losses.{index}"] = torch.tensor(report.losses, dtype=torch.float64)
            tensors[f"outputs.{index}"] = report.outputs
            tensors[f"labels.{index}"] = report.labels
        return Counted(values, tensors)

    @classmethod
    def unpack(cls, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tally:
        """Return the counts that :meth:`pack` has stored; new ones without ``values``.

        Raises:
            CheckpointError: the values are not those of :meth:`pack`.
        """
        if not values:
            return cls()
        try:
            skipped, phases = values["interval_skipped_steps"], values["interval_phase_seconds"]
            parts = []
            for i in range(len(skipped)):
                losses, outputs, labels = (tensors[f"{name}.{i}"] for name in ("losses", "outputs", "labels"))
                parts.append([TrainerReport(losses.tolist(), outputs, labels, phases[i], skipped[i])])
            staleness = values["interval_staleness"]
            interval = Interval(values["interval_seconds"], parts, staleness and Staleness(*staleness))
            return cls(values["samples"], values["seconds"], values["skipped_steps"], interval)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the checkpoint has invalid counts of the run ({error!r})") from error

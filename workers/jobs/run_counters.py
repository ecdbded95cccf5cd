"""What a run has counted so far: part of every checkpoint, so that a resumed run goes on counting."""

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
from workers.controller.distributed_checkpoint import Counted
from workers.controller.job_messages import Report
from workers.controller.session import Session


@dataclass
class Interval:
    """The steps since the last line of progress.

    Attributes:
        seconds: that trainers took for them.
        parts: what each trainer has reported, one call after the other. After a resume with another number
            of trainers, only the first ones have taken all of these steps.
        staleness: of the updates of tables; None where it is zero by design.
    """

    seconds: float = 0.0
    parts: list[list[Report]] = field(default_factory=list)
    staleness: Staleness | None = None

    def add(self, reports: Sequence[Report], seconds: float) -> None:
        """Count some further steps."""
        self.seconds += seconds
        self.parts += [[] for _ in reports[len(self.parts) :]]
        for parts, report in zip(self.parts, reports, strict=False):
            parts.append(report)

    @property
    def num_steps(self) -> int:
        return sum(len(report.losses) for report in self.parts[0])

    @property
    def num_samples(self) -> int:
        return sum(len(report.labels) for parts in self.parts for report in parts)

    @property
    def loss(self) -> float:
        """Mean over the steps."""
        losses = (sum(loss for report in parts for loss in report.losses) for parts in self.parts)
        return sum(losses) / self.num_steps

    def score(self, task: TaskSection) -> float:
        """That of the first task, over all samples, each as it was before the update of its own step."""
        reports = [report for parts in self.parts for report in parts]
        labels_N = torch.cat([report.labels for report in reports])
        counts_N = ~labels_N.isnan()
        outputs_N = torch.cat([report.outputs for report in reports])[counts_N]
        return score(task, outputs_N, labels_N[counts_N])

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Mean over the trainers."""
        reports = [report for parts in self.parts for report in parts]
        return {p: sum(r.phase_seconds[p] for r in reports) / len(self.parts) for p in PHASES}

    @property
    def reports(self) -> list[Report]:
        """Of each trainer, for all of these steps."""
        return [_joined(parts) for parts in self.parts]


def _joined(parts: Sequence[Report]) -> Report:
    """One trainer's reports of some steps after the other, as one."""
    return Report(
        [loss for part in parts for loss in part.losses],
        torch.cat([part.outputs for part in parts]),
        torch.cat([part.labels for part in parts]),
        {phase: sum(part.phase_seconds[phase] for part in parts) for phase in PHASES},
        sum(part.skipped_steps for part in parts),
    )


@dataclass
class Tally:
    """Counts what a run does.

    Attributes:
        samples: trained.
        seconds: that trainers took for them.
        skipped_steps: see :class:`workers.controller.job_messages.Report`.
        interval: the steps since the last line of progress.
    """

    samples: int = 0
    seconds: float = 0.0
    skipped_steps: int = 0
    interval: Interval = field(default_factory=Interval)

    def add(self, reports: Sequence[Report], seconds: float) -> None:
        """Count some further steps."""
        self.samples += sum(len(report.labels) for report in reports)
        self.seconds += seconds
        self.skipped_steps += reports[0].skipped_steps  # the same on every trainer
        self.interval.add(reports, seconds)

    def count_staleness(self, session: Session, step: int) -> None:
        """Count that of all updates before ``step``, which is next; before anybody asks for it.

        It may wait for the last of them, so it is not counted with each call of the trainers.
        """
        if session.config.train.update != "sync":
            staleness = self.interval.staleness or Staleness()
            self.interval.staleness = staleness + session.take_staleness(step)

    def pack(self) -> Counted:
        """It as a checkpoint holds it."""
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
                tensors[f"outputs.{i}"],
                tensors[f"labels.{i}"],
                phases[i],
                skipped[i],
            )
            for i in range(len(skipped))
        ]
        staleness = values["interval_staleness"]
        parts = [[report] for report in reports]
        interval = Interval(values["interval_seconds"], parts, staleness and Staleness(*staleness))
        return cls(values["samples"], values["seconds"], values["skipped_steps"], interval)

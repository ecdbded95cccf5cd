"""Update rules: how gradients become updates, and the staleness that workers measure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from hybrid.config import RunConfig
from hybrid.protocol.learning_rate_schedule import Schedule


class UpdateMode(StrEnum):
    """How the gradients of trainers become updates of tables."""

    SYNC = "sync"
    PIPELINED = "pipelined"
    ASYNC = "async"


@dataclass(frozen=True, slots=True)
class UpdateRules:
    """How gradients become updates, equal on every worker of a run.

    Attributes:
        num_trainers: the trainers that take part in a synchronous step.
        mode: sync, pipelined or async.
        parts: contributions of each trainer to a step, one per micro-batch.
        clip_norm: the largest norm of all gradients of a step; None for no limit.
        check_finite: whether a loss or gradient that is not finite is an error; else its step is skipped.
        timeout_seconds: limit of waiting for the last trainer of a step, or for the decision.
        schedule: how learning rates change from step to step.
    """

    num_trainers: int
    mode: UpdateMode = UpdateMode.SYNC
    parts: int = 1
    clip_norm: float | None = None
    check_finite: bool = True
    timeout_seconds: float = 60.0
    schedule: Schedule = field(default_factory=Schedule)

    @classmethod
    def of(cls, config: RunConfig, schedule: Schedule, num_trainers: int | None = None) -> UpdateRules:
        """Return the rules of a run.

        Args:
            num_trainers: by default ``cluster.trainers``.
        """
        train = config.train
        return cls(
            num_trainers=config.cluster.trainers if num_trainers is None else num_trainers,
            mode=UpdateMode(train.update),
            parts=train.micro_batches,
            clip_norm=train.clip_norm,
            check_finite=train.non_finite == "stop",
            timeout_seconds=config.cluster.timeout_seconds,
            schedule=schedule,
        )

    @property
    def decided(self) -> bool:
        """Whether a step waits for the decision of the trainers (update_guard.py)."""
        return self.clip_norm is not None or not self.check_finite


@dataclass(frozen=True, slots=True)
class Staleness:
    """The number of updates between reading rows and applying the gradients computed from them.

    Attributes:
        count: measured contributions.
        total, largest: over all of them.
    """

    count: int = 0
    total: int = 0
    largest: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def __add__(self, other: Staleness) -> Staleness:
        return Staleness(self.count + other.count, self.total + other.total, max(self.largest, other.largest))

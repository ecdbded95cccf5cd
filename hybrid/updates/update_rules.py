"""Update rules: update modes, and learning rate schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from hybrid.config import RunConfig, ScheduleSection
from hybrid.config.validation import FINITE_SCHEDULES, check_schedule
from hybrid.errors import ConfigError


class UpdateMode(StrEnum):
    """How the gradients of trainers become updates on workers (see ``ledger.py``)."""

    SYNC = "sync"
    LOOKAHEAD = "lookahead"
    ASYNC = "async"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The factor of the learning rates by step; 1 by default.

    During a warm-up, the factor rises linearly from ``initial_factor`` to 1. Let t be the number of steps
    after the warm-up, T the value of t at ``end``, and f the ``final_factor``. The factor then is

    ========== ================================================= ==================================
    kind       factor                                            in torch.optim.lr_scheduler
    ========== ================================================= ==================================
    constant   1
    step       decay_factor ** (t // decay_every)                StepLR
    cosine     f + (1 - f) (1 + cos(pi t / T)) / 2               CosineAnnealingLR
    polynomial f + (1 - f) (1 - t / T) ** power                  PolynomialLR, where f = 0
    one_cycle  half a cosine from initial_factor to 1, then      OneCycleLR, two phases, cos,
               another from 1 to f                               cycle_momentum=False
    ========== ================================================= ==================================
    """

    section: ScheduleSection = ScheduleSection()  # the kind and its settings
    end: int = 0  # number of steps of the schedule, warm-up included; ignored by constant and step

    @classmethod
    def of(cls, section: ScheduleSection, run_steps: int) -> Schedule:
        """Return the schedule of a run of ``run_steps`` steps.

        Raises:
            ConfigError: the schedule ends before the run, or its warm-up is not shorter than the schedule.
        """
        end = section.steps or run_steps
        check_schedule(section, end)
        if section.call.name in FINITE_SCHEDULES and run_steps > end:
            rule = f"the run has {run_steps} steps; set `steps` to at least as many, or to 0 for all of them"
            raise ConfigError("schedule.kind", rule, section.kind)
        return cls(section, end)

    def factor(self, step: int) -> float:
        """Return the factor at ``step``, from 0. After the end of the schedule, return its last factor."""
        section = self.section
        call = self.section.call
        if call.name == "one_cycle":
            # As in torch, the peak may lie between two steps, or before the first.
            peak = call["peak_fraction"] * self.end - 1
            last = self.end - 1
            step = min(step, last)
            if step < peak:
                return _half_cosine(call["initial_factor"], 1.0, step / peak)
            return _half_cosine(1.0, call["final_factor"], (step - peak) / (last - peak))
        steps_after_warmup = step - section.warmup_steps
        if steps_after_warmup < 0:
            initial: float = call["initial_factor"]
            return initial + (1 - initial) * step / section.warmup_steps
        if call.name == "constant":
            return 1.0
        if call.name == "step":
            return float(call["decay_factor"] ** (steps_after_warmup // call["decay_every"]))
        fraction = min(1.0, steps_after_warmup / (self.end - section.warmup_steps))
        if call.name == "cosine":
            return _half_cosine(1.0, call["final_factor"], fraction)
        return float(call["final_factor"] + (1 - call["final_factor"]) * (1 - fraction) ** call["power"])


def _half_cosine(start: float, stop: float, fraction: float) -> float:
    return stop + (start - stop) * (1 + math.cos(math.pi * fraction)) / 2


@dataclass(frozen=True, slots=True)
class UpdateRules:
    """The rules by which gradients become updates; equal on all trainers and workers of a run."""

    num_trainers: int
    mode: UpdateMode = UpdateMode.SYNC
    micro_batches: int = 1  # of a step, with one lookup each; custom loops may have further lookups
    clip_norm: float | None = None  # the largest norm of all gradients of a step; None for no limit
    # Whether a non-finite loss or gradient is an error; if not, the step is skipped.
    check_finite: bool = True
    # How long to wait for the last trainer of a step, or for the decision to apply a step.
    timeout_seconds: float = 60.0
    schedule: Schedule = field(default_factory=Schedule)  # how learning rates change from step to step

    @classmethod
    def of(cls, config: RunConfig, schedule: Schedule, num_trainers: int) -> UpdateRules:
        """Return the rules of a configuration; ``num_trainers`` is 1 for a custom loop without a cluster."""
        train = config.train
        return cls(
            num_trainers=num_trainers,
            mode=UpdateMode(train.update),
            micro_batches=train.micro_batches,
            clip_norm=train.clip_norm,
            check_finite=train.non_finite == "stop",
            timeout_seconds=config.cluster.timeout_seconds,
            schedule=schedule,
        )

    @property
    def has_update_guard(self) -> bool:
        """Whether updates may be clipped or skipped, and so wait for a decision of the trainers."""
        return self.clip_norm is not None or not self.check_finite

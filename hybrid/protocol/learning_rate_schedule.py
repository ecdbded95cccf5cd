"""Learning rate schedules of tables and dense nets.

A schedule is a value that all trainers and workers hold. Each computes the factor of a step itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybrid.config import ScheduleSection
from hybrid.config.validation import SCHEDULES_THAT_END, check_schedule
from hybrid.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Schedule:
    """The factor of the learning rates by step; 1 by default.

    During a warm-up, it rises linearly from ``initial_factor`` to 1. Then, t steps later, with T the steps
    from there to the end and f the ``final_factor``, it is

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

    Attributes:
        section: the kind and its settings.
        end: the steps of the whole schedule, warm-up included; constant and step have no end and ignore it.
    """

    section: ScheduleSection = ScheduleSection()
    end: int = 0

    @classmethod
    def of(cls, section: ScheduleSection, run_steps: int) -> Schedule:
        """The schedule of a run that takes ``run_steps`` steps in all.

        Raises:
            ConfigError: the schedule ends before the run, or its warm-up does not.
        """
        end = section.steps or run_steps
        check_schedule(section, end)
        if section.call.name in SCHEDULES_THAT_END and run_steps > end:
            rule = f"must have at least the {run_steps} steps of the run, or 0 to take these"
            raise ConfigError("schedule.kind", rule, section.kind)
        return cls(section, end)

    def factor(self, step: int) -> float:
        """The factor at ``step``, counted from 0; past the end the last one stays."""
        section, call = self.section, self.section.call
        if call.name == "one_cycle":
            # As in torch, the peak may lie between two steps, or before the first.
            peak, last = call["peak_fraction"] * self.end - 1, self.end - 1
            step = min(step, last)
            if step < peak:
                return _half_cosine(call["initial_factor"], 1.0, step / peak)
            return _half_cosine(1.0, call["final_factor"], (step - peak) / (last - peak))
        since = step - section.warmup_steps
        if since < 0:
            initial: float = call["initial_factor"]
            return initial + (1 - initial) * step / section.warmup_steps
        if call.name == "constant":
            return 1.0
        if call.name == "step":
            return float(call["decay_factor"] ** (since // call["decay_every"]))
        done = min(1.0, since / (self.end - section.warmup_steps))
        if call.name == "cosine":
            return _half_cosine(1.0, call["final_factor"], done)
        return float(call["final_factor"] + (1 - call["final_factor"]) * (1 - done) ** call["power"])


def _half_cosine(start: float, stop: float, done: float) -> float:
    return stop + (start - stop) * (1 + math.cos(math.pi * done)) / 2

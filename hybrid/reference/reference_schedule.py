"""Learning rates of the reference, by torch's schedulers.

It shares nothing with ``learning_rate_schedule.py``, which has the formulas.
"""

import math
from collections.abc import Iterator
from itertools import chain, count, islice, repeat

import torch
from torch.optim import lr_scheduler

from hybrid.config import ScheduleSection


def learning_rate_factors(section: ScheduleSection, total_steps: int) -> Iterator[float]:
    """Yield the factor of the learning rates in each step, without end.

    The rate rises in the first ``warmup_steps``, then follows ``kind`` until the last step of the schedule,
    and stays constant.
    """
    rising = lr_scheduler.LinearLR(
        _unit_rate(), section.call["initial_factor"], total_iters=section.warmup_steps
    )
    return chain(islice(_rates(rising), section.warmup_steps), _falling_factors(section, total_steps))


def _falling_factors(section: ScheduleSection, total_steps: int) -> Iterator[float]:
    # A run may end before its warm-up does.
    steps = max(1, (section.steps or total_steps) - section.warmup_steps)
    call = section.call
    final = call.arguments.get("final_factor", 0.0)
    match call.name:
        case "step":
            return _rates(lr_scheduler.StepLR(_unit_rate(), call["decay_every"], call["decay_factor"]))
        case "cosine":
            return _rates(lr_scheduler.CosineAnnealingLR(_unit_rate(), steps, eta_min=final), steps)
        case "polynomial":
            falling = _rates(lr_scheduler.PolynomialLR(_unit_rate(), steps, call["power"]), steps)
            return (final + (1 - final) * factor for factor in falling)
        case "one_cycle" if call["peak_fraction"] * steps <= 1:
            # There is no step to rise in, so that torch would divide by zero.
            return _rates(lr_scheduler.CosineAnnealingLR(_unit_rate(), steps - 1, eta_min=final), steps - 1)
        case "one_cycle":
            cycle = lr_scheduler.OneCycleLR(
                _unit_rate(),
                max_lr=1.0,
                total_steps=steps,
                pct_start=call["peak_fraction"],
                div_factor=1 / call["initial_factor"],
                final_div_factor=call["initial_factor"] / final if final else math.inf,
                cycle_momentum=False,
            )
            return _rates(cycle, steps - 1)
    return repeat(1.0)


def _unit_rate() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(())], lr=1.0)


def _rates(scheduler: lr_scheduler.LRScheduler, last_step: float = math.inf) -> Iterator[float]:
    """Yield the rate of each step, constant after ``last_step``, where torch's formulas would reverse."""
    for step in count():
        yield float(scheduler.get_last_lr()[0])
        if step < last_step:
            scheduler.optimizer.step()  # torch warns of a scheduler that runs ahead of its optimizer
            scheduler.step()

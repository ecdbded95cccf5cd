"""What a run counts: the same line of progress however its steps were called, through a checkpoint too."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config import RunConfig, TrainSection
from hybrid.errors import CheckpointError
from hybrid.primitives.step_timings import PHASES
from hybrid.protocol.update_rules import Staleness
from workers.controller.remote_trainer import TrainerReport
from workers.controller.session import Session
from workers.jobs.run_counters import Interval, Tally

SIZE = 5
CLICKS = RunConfig().all_tasks["label"]


def reports(steps: range, trainers: int = 2) -> list[TrainerReport]:
    """What trainers would report of some steps."""
    made = []
    for trainer in range(trainers):
        drawn = [torch.Generator().manual_seed(100 * step + trainer) for step in steps]
        logits = torch.cat([torch.randn(SIZE, generator=g) for g in drawn])
        labels = torch.cat([torch.randint(0, 2, (SIZE,), generator=g).float() for g in drawn])
        losses = [torch.rand(1, generator=g, dtype=torch.float64).item() for g in drawn]
        made.append(TrainerReport(losses, logits, labels, {p: 0.5 * len(steps) for p in PHASES}, len(steps)))
    return made


class Workers:
    """A session whose rows are as stale as steps are taken since it was asked.

    Attributes:
        taken: the steps at which it was asked.
    """

    def __init__(self, update: str = "pipelined") -> None:
        self.config = RunConfig(train=TrainSection(update=update))
        self.taken = [0]

    def take_staleness(self, step: int) -> Staleness:
        self.taken.append(step)
        return Staleness(1, step - self.taken[-2], step - self.taken[-2])

    def count(self, tally: Tally, steps: range) -> None:
        tally.add(reports(steps), 0.25 * len(steps))
        tally.count_staleness(cast(Session, self), steps.stop)


def counted(calls: Sequence[range]) -> Tally:
    tally, workers = Tally(), Workers()
    for steps in calls:
        workers.count(tally, steps)
    return tally


def stored(tally: Tally, folder: Path) -> Tally:
    """It after a checkpoint."""
    values, tensors = tally.pack()
    write_tensors(folder, "progress", tensors)
    return Tally.unpack(json.loads(json.dumps(values)), load_file(folder / "progress"))


@pytest.mark.parametrize("cut", [1, 3, 6])
@pytest.mark.parametrize("is_stored", [False, True], ids=["in one run", "through a checkpoint"])
def test_a_line_is_the_same_bit_for_bit_wherever_its_steps_were_cut(
    cut: int, is_stored: bool, tmp_path: Path
) -> None:
    whole = counted([range(7)])
    tally, workers = Tally(), Workers()
    workers.count(tally, range(cut))
    if is_stored:
        tally = stored(tally, tmp_path)
    workers.count(tally, range(cut, 7))
    assert (tally.samples, tally.skipped_steps) == (whole.samples, whole.skipped_steps) == (70, 7)
    assert tally.seconds == tally.interval.seconds == 1.75
    interval = tally.interval
    assert (interval.num_steps, interval.num_samples) == (7, 70)
    for mine, theirs in zip(interval.reports, whole.interval.reports, strict=True):
        assert mine.losses == theirs.losses
        assert torch.equal(mine.outputs, theirs.outputs)
        assert torch.equal(mine.labels, theirs.labels)
    assert (interval.loss, interval.score(CLICKS)) == (whole.interval.loss, whole.interval.score(CLICKS))
    assert interval.phase_seconds == dict.fromkeys(PHASES, 3.5)
    assert interval.staleness == Staleness(2, 7, max(cut, 7 - cut))


def test_a_checkpoint_right_after_a_line_has_nothing_of_the_next(tmp_path: Path) -> None:
    tally = counted([range(3)])
    tally.interval = Interval()
    assert tally.pack().reports == {}
    again = stored(tally, tmp_path)
    assert again == tally
    assert (again.samples, again.interval.reports, again.interval.staleness) == (30, [], None)


def test_rows_that_are_never_stale_are_not_asked_for_it() -> None:
    tally, workers = Tally(), Workers("sync")
    workers.count(tally, range(3))
    assert (tally.interval.staleness, workers.taken) == (None, [0])


def test_what_has_counted_nothing_is_a_new_run() -> None:
    assert Tally.unpack({}, {}) == Tally()


@pytest.mark.parametrize("wrong", [{"samples": 1}, {"interval_skipped_steps": 3}, [1]])
def test_what_no_run_has_counted_is_refused(wrong: Any) -> None:
    with pytest.raises(CheckpointError, match="invalid counts"):
        Tally.unpack(wrong, {})


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_another_number_of_trainers_may_go_on(before: int, after: int, tmp_path: Path) -> None:
    tally = Tally()
    tally.add(reports(range(2), before), 1.0)
    tally = stored(tally, tmp_path)
    tally.add(reports(range(2, 5), after), 1.0)
    parts = [*reports(range(2), before), *reports(range(2, 5), after)]
    assert tally.interval.num_steps == 5
    assert tally.interval.num_samples == sum(len(part.labels) for part in parts)
    assert tally.interval.loss == pytest.approx(sum(sum(part.losses) for part in parts) / 5)

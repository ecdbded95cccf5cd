"""The counts of a run do not depend on the calls of the trainers, nor on a resume; and when patience ends."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid.checkpoint.checkpoint_folders import Best
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config import RunConfig, TrainSection
from hybrid.errors import CheckpointError
from hybrid.primitives.step_timings import PHASES
from workers.controller.remote_trainer import TrainerReport
from workers.jobs.checkpoint_schedule import Interval, Tally
from workers.jobs.training_job import is_patience_over

SIZE = 5
CLICKS = RunConfig().all_tasks["label"]


def reports(steps: range, trainers: int = 2) -> list[TrainerReport]:
    """Return reports of trainers on some steps."""
    made = []
    for trainer in range(trainers):
        draws = [torch.Generator().manual_seed(100 * step + trainer) for step in steps]
        logits = torch.cat([torch.randn(SIZE, generator=g) for g in draws])
        labels = torch.cat([torch.randint(0, 2, (SIZE,), generator=g).float() for g in draws])
        losses = [torch.rand(1, generator=g, dtype=torch.float64).item() for g in draws]
        made.append(TrainerReport(losses, logits, labels, {p: 0.5 * len(steps) for p in PHASES}, len(steps)))
    return made


def count(calls: Sequence[range]) -> Tally:
    """Count steps in some calls of the trainers."""
    tally = Tally()
    for steps in calls:
        tally.add(reports(steps), 0.25 * len(steps))
    return tally


def restored(tally: Tally, folder: Path) -> Tally:
    """Return the counts from a checkpoint."""
    values, tensors = tally.pack()
    write_tensors(folder, "progress", tensors)
    return Tally.unpack(json.loads(json.dumps(values)), load_file(folder / "progress"))


@pytest.mark.parametrize("cut", [1, 3, 6])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_counts_do_not_depend_on_calls_and_resumes(cut: int, is_resumed: bool, tmp_path: Path) -> None:
    whole = count([range(7)])
    tally = count([range(cut)])
    if is_resumed:
        tally = restored(tally, tmp_path)
    tally.add(reports(range(cut, 7)), 0.25 * (7 - cut))
    assert (tally.samples, tally.skipped_steps) == (whole.samples, whole.skipped_steps) == (70, 7)
    interval = tally.interval
    assert tally.seconds == interval.seconds == 1.75
    assert (interval.num_steps, interval.num_samples) == (7, 70)
    assert (interval.loss, interval.score(CLICKS)) == (whole.interval.loss, whole.interval.score(CLICKS))
    assert interval.phase_seconds == dict.fromkeys(PHASES, (7 - cut) / 2 if is_resumed else 3.5)
    packed, expected = tally.pack().reports, whole.pack().reports
    assert packed.keys() == expected.keys()
    for name in packed:
        assert torch.equal(packed[name], expected[name])


def test_a_checkpoint_after_a_log_step_has_no_samples(tmp_path: Path) -> None:
    tally = count([range(3)])
    tally.interval = Interval()
    assert tally.pack().reports == {}
    assert restored(tally, tmp_path) == tally
    assert tally.samples == 30


def test_counts_of_other_versions_are_refused() -> None:
    assert Tally.unpack({}, {}) == Tally()
    with pytest.raises(CheckpointError, match="start a new run"):
        Tally.unpack({"samples": 1, "interval_skipped_steps": 3}, {})


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_counts_continue_with_another_number_of_trainers(before: int, after: int, tmp_path: Path) -> None:
    tally = Tally()
    tally.add(reports(range(2), before), 1.0)
    tally = restored(tally, tmp_path)
    tally.add(reports(range(2, 5), after), 1.0)
    parts = [*reports(range(2), before), *reports(range(2, 5), after)]
    assert tally.interval.num_steps == 5
    assert tally.interval.num_samples == sum(len(part.labels) for part in parts)
    assert tally.interval.loss == pytest.approx(sum(sum(part.losses) for part in parts) / 5)


@pytest.mark.parametrize(
    ("patience", "best", "step", "is_over"),
    [
        (0, Best("auc", 0.7, 10), 1000, False),
        (2, Best("auc", 0.7, 10), 29, False),
        (2, Best("auc", 0.7, 10), 30, True),
        (2, None, 10, False),
        (2, None, 20, True),
        (1, Best("auc", math.nan, 10), 10, True),
    ],
)
def test_patience_counts_evaluations_since_the_best(
    patience: int, best: Best | None, step: int, is_over: bool
) -> None:
    assert is_patience_over(TrainSection(patience=patience), 10, best, step) == is_over
    assert is_patience_over(TrainSection(patience=patience, eval_every_steps=10), 7, best, step) == is_over

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
from workers.jobs.checkpoint_schedule import RunProgress

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


def count(calls: Sequence[range]) -> RunProgress:
    """Count steps in some calls of the trainers."""
    counts = RunProgress()
    for steps in calls:
        counts.add(reports(steps), 0.25 * len(steps))
    return counts


def restored(counts: RunProgress, folder: Path) -> RunProgress:
    """Return the counts from a checkpoint."""
    values, tensors = counts.pack()
    counts.undefined.append(99)  # the checkpoint is written while training continues
    write_tensors(folder, "progress", tensors)
    return RunProgress.unpack(counts.step, json.loads(json.dumps(values)), load_file(folder / "progress"))


@pytest.mark.parametrize("cut", [1, 3, 6])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_counts_do_not_depend_on_calls_and_resumes(cut: int, is_resumed: bool, tmp_path: Path) -> None:
    whole = count([range(7)])
    counts = count([range(cut)])
    if is_resumed:
        counts = restored(counts, tmp_path)
    counts.add(reports(range(cut, 7)), 0.25 * (7 - cut))
    assert (counts.samples, counts.skipped_steps) == (whole.samples, whole.skipped_steps) == (70, 7)
    assert counts.undefined == []
    interval = counts.interval
    assert counts.seconds == interval.seconds == 1.75
    assert (counts.step, interval.num_steps, interval.num_samples) == (7, 7, 70)
    assert (interval.loss, interval.score(CLICKS)) == (whole.interval.loss, whole.interval.score(CLICKS))
    assert interval.phase_seconds == dict.fromkeys(PHASES, (7 - cut) / 2 if is_resumed else 3.5)
    (_, packed), (_, expected) = counts.pack(), whole.pack()
    assert packed.keys() == expected.keys()
    for name in packed:
        assert torch.equal(packed[name], expected[name])


def test_counts_of_other_versions_are_refused() -> None:
    assert RunProgress.unpack(3, {}, {}) == RunProgress(3)
    with pytest.raises(CheckpointError):
        RunProgress.unpack(3, {"samples": 1, "interval_skipped_steps": 3}, {})


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_counts_continue_with_another_number_of_trainers(before: int, after: int, tmp_path: Path) -> None:
    counts = RunProgress()
    counts.add(reports(range(2), before), 1.0)
    counts = restored(counts, tmp_path)
    counts.add(reports(range(2, 5), after), 1.0)
    parts = [*reports(range(2), before), *reports(range(2, 5), after)]
    assert counts.interval.num_steps == 5
    assert counts.interval.num_samples == sum(len(part.labels) for part in parts)
    assert counts.interval.loss == pytest.approx(sum(sum(part.losses) for part in parts) / 5)


@pytest.mark.parametrize(
    ("patience", "best", "undefined", "step", "is_over"),
    [
        (0, Best("auc", 0.7, 10), [], 1000, False),
        (2, Best("auc", 0.7, 10), [], 29, False),
        (2, Best("auc", 0.7, 10), [], 30, True),
        (2, Best("auc", 0.7, 30), [10, 40, 70], 60, True),
        (2, None, [], 20, True),
        (1, Best("auc", math.nan, 10), [10], 10, False),
    ],
)
def test_patience_counts_evaluations_since_the_best(
    patience: int, best: Best | None, undefined: list[int], step: int, is_over: bool
) -> None:
    for per_epoch, every in ((10, 0), (7, 10)):
        section = TrainSection(patience=patience, eval_every_steps=every)
        assert RunProgress(step, undefined=undefined).has_lost_patience(section, per_epoch, best) == is_over

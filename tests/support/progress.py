"""The progress and the metrics of a run, for tests that log, report or print them."""

import dataclasses
from typing import Any

from hybrid.metrics import BinaryMetrics
from workers.console import TrainingProgress

PROGRESS = TrainingProgress(
    step=0,
    total_steps=100,
    epoch=1,
    epochs=1,
    loss=0.5,
    score_name="auc",
    score=0.7,
    samples_per_second=1000.0,
    seconds_left=1.0,
    phase_seconds={"data": 0.0, "lookup": 1.0, "dense": 1.0, "backward": 2.0, "update": 0.0},
)
METRICS = BinaryMetrics(0.7712, 0.4532, 0.8123, 1.01, 0.8, 0.25, 1000)._asdict()


def progress(step: int, **changes: Any) -> TrainingProgress:
    return dataclasses.replace(PROGRESS, step=step, **changes)

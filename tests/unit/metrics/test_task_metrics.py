"""What each kind of task is measured by, as scikit-learn has it; and measures of the user's own."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.metrics import (
    accuracy_score,
    log_loss,
    mean_absolute_error,
    ndcg_score,
    roc_auc_score,
    root_mean_squared_error,
)
from torch import Tensor

from hybrid.config import TaskSection
from hybrid.errors import ConfigError
from hybrid.metrics.task_metrics import predicted, score, task_metrics

DRAW = torch.Generator().manual_seed(2)
NUMBERS, TRUE_NUMBERS = torch.randn(200, generator=DRAW), torch.randn(200, generator=DRAW)
LOGITS, CLASSES = torch.randn(200, 4, generator=DRAW), torch.randint(0, 4, (200,), generator=DRAW).float()
CLICKS = torch.randint(0, 2, (200,), generator=DRAW).float()
ONE_GROUP = torch.zeros(200, dtype=torch.int64)


def test_regression_metrics_are_those_of_scikit_learn() -> None:
    task = TaskSection(type="regression", metrics=("ndcg@7",))
    gains = TRUE_NUMBERS.abs()
    found = task_metrics("spent", task, NUMBERS, gains, ONE_GROUP)
    assert found["rmse"] == pytest.approx(
        root_mean_squared_error(gains.double(), NUMBERS.double()), rel=1e-12
    )
    assert found["mae"] == pytest.approx(mean_absolute_error(gains.double(), NUMBERS.double()), rel=1e-12)
    expected = ndcg_score([gains.double().numpy()], [NUMBERS.double().numpy()], k=7)
    assert found["ndcg@7"] == pytest.approx(expected, rel=1e-12)
    assert (found["num_samples"], score(task, NUMBERS, gains)) == (200, found["rmse"])


@given(st.integers(0, 2**32), st.sampled_from([0.1, 1.0, 4.0]))
@settings(max_examples=10, deadline=None)
def test_weighted_metrics_equal_scikit_learn(seed: int, spread: float) -> None:
    """With scores that tie, of every kind of task."""
    weights_N = (spread * torch.randn(200, generator=torch.Generator().manual_seed(seed))).exp()
    by = {"sample_weight": weights_N.double().numpy()}
    tied = NUMBERS.round(decimals=1)
    found = task_metrics("click", TaskSection(), tied, CLICKS, None, weights_N)
    probabilities, clicks = predicted(TaskSection(), tied).numpy(), CLICKS.numpy()
    assert found["auc"] == pytest.approx(roc_auc_score(clicks, probabilities, **by), abs=1e-12)
    loss, rate = log_loss(clicks, probabilities, **by), np.average(clicks, weights=by["sample_weight"])
    assert found["log_loss"] == pytest.approx(loss, rel=1e-12)
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    assert found["normalised_entropy"] == pytest.approx(loss / entropy, rel=1e-12)
    mean = np.average(probabilities, weights=by["sample_weight"])
    assert found["calibration"] == pytest.approx(mean / rate, rel=1e-12)
    assert found["accuracy"] == pytest.approx(accuracy_score(clicks, probabilities > 0.5, **by), rel=1e-12)
    assert found["base_rate"] == pytest.approx(rate, rel=1e-12)
    assert found["num_samples"] == 200
    truth, numbers = TRUE_NUMBERS.double().numpy(), NUMBERS.double().numpy()
    found = task_metrics("spent", TaskSection(type="regression"), NUMBERS, TRUE_NUMBERS, None, weights_N)
    assert found["rmse"] == pytest.approx(root_mean_squared_error(truth, numbers, **by), rel=1e-12)
    assert found["mae"] == pytest.approx(mean_absolute_error(truth, numbers, **by), rel=1e-12)
    task = TaskSection(type="classes(4)")
    found = task_metrics("stars", task, LOGITS, CLASSES, None, weights_N)
    stars = CLASSES.numpy()
    assert found["accuracy"] == pytest.approx(accuracy_score(stars, LOGITS.argmax(1), **by), rel=1e-12)
    assert found["log_loss"] == pytest.approx(log_loss(stars, predicted(task, LOGITS), **by), rel=1e-12)


@pytest.mark.parametrize(
    ("task", "outputs", "labels"),
    [
        (TaskSection(), NUMBERS, CLICKS),
        (TaskSection(type="regression"), NUMBERS, TRUE_NUMBERS),
        (TaskSection(type="classes(4)"), LOGITS, CLASSES),
    ],
    ids=["binary", "regression", "classes"],
)
def test_integer_weights_equal_repeated_samples(task: TaskSection, outputs: Tensor, labels: Tensor) -> None:
    times = torch.randint(1, 5, (200,), generator=torch.Generator().manual_seed(4))
    once = task_metrics("t", task, outputs, labels, None, times.float())
    outputs, labels = (each.repeat_interleave(times, 0) for each in (outputs, labels))
    repeated = task_metrics("t", task, outputs, labels, None)
    assert (once.pop("num_samples"), repeated.pop("num_samples")) == (200, int(times.sum()))
    assert once == pytest.approx(repeated, rel=1e-12)


def test_ranking_metrics_ignore_weights() -> None:
    task = TaskSection(metrics=("gauc", "ndcg@5", "mrr"))
    groups = torch.arange(200) // 10
    plain = task_metrics("click", task, NUMBERS, CLICKS, groups)
    found = task_metrics("click", task, NUMBERS, CLICKS, groups, torch.linspace(1, 9, 200))
    assert [found[name] == plain[name] for name in ("gauc", "ndcg@5", "mrr", "auc")] == [True] * 3 + [False]


@pytest.mark.parametrize(
    "task",
    [TaskSection(metrics=("gauc",)), TaskSection(type="regression"), TaskSection(type="classes(4)")],
)
def test_metrics_without_samples_are_nan(task: TaskSection) -> None:
    outputs = LOGITS[:0] if task.kind == "classes" else NUMBERS[:0]
    found = task_metrics("t", task, outputs, CLICKS[:0], None)
    assert set(found) == set(task.metric_names)
    assert found.pop("num_samples") == 0
    assert all(math.isnan(value) for value in found.values())
    assert math.isnan(score(task, outputs, CLICKS[:0]))


def test_nan_output_gives_nan_ranking_metrics() -> None:
    task = TaskSection(metrics=("gauc", "mrr"))
    outputs = NUMBERS.clone()
    outputs[5] = math.nan
    found = task_metrics("click", task, outputs, CLICKS, ONE_GROUP)
    assert math.isnan(found["gauc"])
    assert math.isnan(found["mrr"])


OWN = """
def lift(predictions, labels):
    return labels[predictions > 0.5].mean() / labels.mean()

def told(predictions, labels):
    return "good"
"""


def test_custom_metric_gets_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_metrics.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    found = task_metrics("click", TaskSection(metrics=("own_metrics:lift",)), NUMBERS, CLICKS, None)
    assert found["lift"] == pytest.approx((CLICKS[NUMBERS > 0].mean() / CLICKS.mean()).item())
    with pytest.raises(
        ConfigError, match=r"^tasks\.click\.metrics = 'own_metrics:told': fails, or returns no"
    ):
        task_metrics("click", TaskSection(metrics=("own_metrics:told",)), NUMBERS, CLICKS, None)

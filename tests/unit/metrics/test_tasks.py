"""What each kind of task is measured by, as scikit-learn has it; and measures of the user's own."""

import math
from pathlib import Path

import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    log_loss,
    mean_absolute_error,
    ndcg_score,
    roc_auc_score,
    root_mean_squared_error,
)

from hybrid.config import TaskSection
from hybrid.errors import ConfigError
from hybrid.metrics.tasks import predicted, score, task_metrics

DRAW = torch.Generator().manual_seed(2)
NUMBERS, TRUE_NUMBERS = torch.randn(200, generator=DRAW), torch.randn(200, generator=DRAW)
LOGITS, CLASSES = torch.randn(200, 4, generator=DRAW), torch.randint(0, 4, (200,), generator=DRAW).float()
CLICKS = torch.randint(0, 2, (200,), generator=DRAW).float()
ONE_GROUP = torch.zeros(200, dtype=torch.int64)


def test_binary_metrics_are_those_of_scikit_learn() -> None:
    found = task_metrics("click", TaskSection(), NUMBERS, CLICKS, None)
    probabilities = NUMBERS.double().sigmoid().numpy()
    assert found["auc"] == pytest.approx(roc_auc_score(CLICKS, probabilities), abs=1e-12)
    assert found["log_loss"] == pytest.approx(log_loss(CLICKS, probabilities), rel=1e-12)
    assert found["accuracy"] == accuracy_score(CLICKS, probabilities > 0.5)


def test_regression_metrics_are_those_of_scikit_learn() -> None:
    task = TaskSection(kind="regression", metrics=("ndcg@7",))
    gains = TRUE_NUMBERS.abs()
    found = task_metrics("spent", task, NUMBERS, gains, ONE_GROUP)
    assert found["rmse"] == pytest.approx(
        root_mean_squared_error(gains.double(), NUMBERS.double()), rel=1e-12
    )
    assert found["mae"] == pytest.approx(mean_absolute_error(gains.double(), NUMBERS.double()), rel=1e-12)
    expected = ndcg_score([gains.double().numpy()], [NUMBERS.double().numpy()], k=7)
    assert found["ndcg@7"] == pytest.approx(expected, rel=1e-12)
    assert (found["num_samples"], score(task, NUMBERS, gains)) == (200, found["rmse"])


def test_metrics_of_classes_are_those_of_scikit_learn() -> None:
    task = TaskSection(kind="classes", classes=4)
    found = task_metrics("stars", task, LOGITS, CLASSES, None)
    probabilities = predicted(task, LOGITS)
    assert found["accuracy"] == accuracy_score(CLASSES, LOGITS.argmax(1))
    assert found["log_loss"] == pytest.approx(log_loss(CLASSES, probabilities), rel=1e-12)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(200, dtype=torch.float64))


@pytest.mark.parametrize(
    "task",
    [TaskSection(metrics=("gauc",)), TaskSection(kind="regression"), TaskSection(kind="classes", classes=4)],
)
def test_no_samples_have_no_metrics(task: TaskSection) -> None:
    outputs = LOGITS[:0] if task.kind == "classes" else NUMBERS[:0]
    found = task_metrics("t", task, outputs, CLICKS[:0], None)
    assert set(found) == set(task.metric_names)
    assert found.pop("num_samples") == 0
    assert all(math.isnan(value) for value in found.values())
    assert math.isnan(score(task, outputs, CLICKS[:0]))


def test_a_diverged_model_has_no_order() -> None:
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


def test_a_metric_of_the_users_own_sees_what_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_metrics.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    found = task_metrics("click", TaskSection(metrics=("own_metrics:lift",)), NUMBERS, CLICKS, None)
    assert found["lift"] == pytest.approx((CLICKS[NUMBERS > 0].mean() / CLICKS.mean()).item())
    with pytest.raises(ConfigError, match=r"^tasks\.click\.metrics = 'own_metrics:told': fails, or gives no"):
        task_metrics("click", TaskSection(metrics=("own_metrics:told",)), NUMBERS, CLICKS, None)

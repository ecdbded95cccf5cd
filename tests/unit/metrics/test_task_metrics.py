"""Metrics of tasks and of the order within groups equal those of scikit-learn; ties, masks and weights."""

import math
from itertools import permutations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hybrid.config import RunConfig, TaskSection
from hybrid.errors import ConfigError
from hybrid.metrics import (
    Predictions,
    ProgressiveMetrics,
    Ranking,
    binary_metrics,
    compute_predictions,
    probabilities,
    task_metrics,
)

DRAW = torch.Generator().manual_seed(2)
NUMBERS, TRUE_NUMBERS = torch.randn(200, generator=DRAW), torch.randn(200, generator=DRAW)
LOGITS, CLASSES = torch.randn(200, 4, generator=DRAW), torch.randint(0, 4, (200,), generator=DRAW).float()
CLICKS = torch.randint(0, 2, (200,), generator=DRAW).float()
ONE_GROUP = torch.zeros(200, dtype=torch.int64)
CLICK_TASKS = RunConfig().all_tasks


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 1.0, 4.0]))
@settings(max_examples=10, deadline=None)
def test_weighted_metrics_equal_scikit_learn(seed: int, spread: float) -> None:
    """Scores have ties; all weights are 1 where ``spread`` is 0, which equals no weights."""
    from sklearn import metrics as sklearn  # slow to import

    weights_N = (spread * torch.randn(200, generator=torch.Generator().manual_seed(seed))).exp()
    given_N = weights_N if spread else None
    by = {"sample_weight": weights_N.double().numpy()}
    tied = NUMBERS.round(decimals=1)
    found = task_metrics("click", TaskSection(), tied, CLICKS, None, given_N)
    probabilities, clicks = compute_predictions(TaskSection(), tied).numpy(), CLICKS.numpy()
    loss = sklearn.log_loss(clicks, probabilities, **by)
    rate = np.average(clicks, weights=by["sample_weight"])
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    expected = {
        "auc": sklearn.roc_auc_score(clicks, probabilities, **by),
        "log_loss": loss,
        "normalized_entropy": loss / entropy,
        "calibration": np.average(probabilities, weights=by["sample_weight"]) / rate,
        "accuracy": sklearn.accuracy_score(clicks, probabilities > 0.5, **by),
        "base_rate": rate,
        "num_samples": 200,
    }
    assert found == pytest.approx(expected, rel=1e-12)
    task, gains = TaskSection(type="regression", metrics=("ndcg@7",)), TRUE_NUMBERS.abs()
    found = task_metrics("spent", task, NUMBERS, gains, ONE_GROUP, given_N)
    rmse = sklearn.root_mean_squared_error(gains.double(), NUMBERS.double(), **by)
    mae = sklearn.mean_absolute_error(gains.double(), NUMBERS.double(), **by)
    ndcg = sklearn.ndcg_score([gains.double().numpy()], [NUMBERS.double().numpy()], k=7)  # without weights
    expected = {"rmse": rmse, "mae": mae, "num_samples": 200, "ndcg@7": ndcg}
    assert found == pytest.approx(expected, rel=1e-12)
    task = TaskSection(type="classes(4)")
    found = task_metrics("stars", task, LOGITS, CLASSES, None, given_N)
    stars = CLASSES.long().numpy()
    assert found["accuracy"] == pytest.approx(
        sklearn.accuracy_score(stars, LOGITS.argmax(1), **by), rel=1e-12
    )
    assert found["log_loss"] == pytest.approx(
        sklearn.log_loss(stars, compute_predictions(task, LOGITS), **by), rel=1e-12
    )


def test_large_logits_do_not_overflow() -> None:
    found = binary_metrics(torch.tensor([-1000.0, -900, 900, 1000]), torch.tensor([1.0, 0, 0, 1]))
    assert found.log_loss == pytest.approx((1000 + 900) / 4)
    assert found.auc == 0.5


def test_auc_ranks_rounded_probabilities() -> None:
    wrong = binary_metrics(torch.tensor([20.0, 20.0 + 2**-18]), torch.tensor([1.0, 0.0]))
    assert wrong.auc == 0.0
    one = binary_metrics(torch.tensor([100.0, 200.0]), torch.tensor([1.0, 0.0]))  # both are 1.0
    assert one.auc == 0.5


def test_auc_of_many_samples_is_exact() -> None:
    size = 200_000
    ranks_N = torch.randperm(size) + 1
    labels_N = (torch.rand(size) < ranks_N / size).float()
    positives = int(labels_N.sum())
    wins = int(ranks_N[labels_N == 1].sum()) - positives * (positives + 1) // 2  # Mann and Whitney 1947
    expected = wins / (positives * (size - positives))
    assert binary_metrics(ranks_N / size, labels_N).auc == expected


@given(st.integers(1, 70), st.floats(-30, 30, width=32))
def test_probability_is_independent_of_the_position(size: int, logit: float) -> None:
    assert len(probabilities(torch.full((size,), logit)).unique()) == 1


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_single_class_has_no_auc(label: float) -> None:
    found = binary_metrics(torch.tensor([0.0, 2.0]), torch.full((2,), label))
    undefined = {name for name, value in found._asdict().items() if math.isnan(value)}
    assert undefined == {"auc", "normalized_entropy"} | ({"calibration"} if label == 0 else set())


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_nan_outputs_give_nan_metrics(logit: float) -> None:
    outputs = NUMBERS.clone()
    outputs[5] = logit
    found = task_metrics("click", TaskSection(metrics=("gauc", "mrr")), outputs, CLICKS, ONE_GROUP)
    assert all(math.isnan(found[name]) == math.isnan(logit) for name in ("auc", "gauc", "mrr"))
    assert math.isnan(found["log_loss"])
    window = ProgressiveMetrics()
    window.add(outputs, CLICKS)
    expected = {name: found[name] for name in ("auc", "log_loss", "calibration", "num_samples")}
    assert window.metrics() == pytest.approx(expected, rel=1e-4, nan_ok=True)
    (logits := LOGITS.clone())[5, 0] = logit
    found = task_metrics("stars", TaskSection(type="classes(4)"), logits, CLASSES, None)
    assert math.isnan(found["accuracy"]) == math.isnan(logit)


@pytest.mark.parametrize(
    "task", [TaskSection(metrics=("gauc",)), TaskSection(type="regression"), TaskSection(type="classes(4)")]
)
def test_metrics_without_samples_are_nan(task: TaskSection) -> None:
    outputs = LOGITS[:0] if task.kind == "classes" else NUMBERS[:0]
    found = task_metrics("t", task, outputs, CLICKS[:0], None)
    assert set(found) == set(task.metric_names)
    assert found.pop("num_samples") == 0
    assert all(math.isnan(value) for value in found.values())


CUSTOM = """
def lift(predictions, labels):
    return labels[predictions > 0.5].mean() / labels.mean()

def text(predictions, labels):
    return "good"
"""


def test_custom_metric_gets_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "custom_metrics.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    found = task_metrics("click", TaskSection(metrics=("custom_metrics:lift",)), NUMBERS, CLICKS, None)
    assert found["lift"] == pytest.approx((CLICKS[NUMBERS > 0].mean() / CLICKS.mean()).item())
    with pytest.raises(ConfigError, match=r"^tasks\.click\.metrics = 'custom_metrics:text': "):
        task_metrics("click", TaskSection(metrics=("custom_metrics:text",)), NUMBERS, CLICKS, None)


class TestPredictions:
    """400 samples, most of which occur many times, with outputs that differ in their last bits."""

    @pytest.fixture
    def noisy(self) -> Predictions:
        generator = torch.Generator().manual_seed(1)
        rows_N = torch.randint(-40, 40, (400,), generator=generator)
        labels_N = (torch.rand(400, generator=generator) < (rows_N / 10).sigmoid()).float()
        noise_N = torch.randn(400, generator=generator) * 1e-6
        return Predictions(rows_N / 10 + noise_N, labels_N, rows_N)

    def test_equal_samples_are_tied(self, noisy: Predictions) -> None:
        from sklearn.metrics import roc_auc_score  # slow to import

        clean_N = noisy.feature_hashes.double() / 10
        expected = roc_auc_score(noisy.labels, clean_N)
        assert noisy.metrics(CLICK_TASKS)["auc"] == pytest.approx(expected, abs=1e-15)
        assert abs(binary_metrics(noisy.outputs, noisy.labels).auc - expected) > 1e-4
        tied = noisy.tie_equal_samples()
        assert torch.allclose(tied.outputs.double(), clean_N, rtol=0, atol=5e-6)
        assert torch.equal(tied.tie_equal_samples().outputs, tied.outputs)
        alone = noisy._replace(feature_hashes=torch.arange(400))
        assert torch.equal(alone.tie_equal_samples().outputs, alone.outputs)

    def test_metrics_are_independent_of_order_and_batches(self, noisy: Predictions) -> None:
        order_N = torch.randperm(400)
        parts = [Predictions(*(t[order_N][i : i + 37] for t in noisy[:3])) for i in range(0, 400, 37)]
        joined = Predictions.concatenate(parts)
        assert torch.equal(joined.outputs, noisy.outputs[order_N])
        assert joined.metrics(CLICK_TASKS) == pytest.approx(noisy.metrics(CLICK_TASKS), rel=1e-9)
        assert joined.metrics(CLICK_TASKS)["auc"] == noisy.metrics(CLICK_TASKS)["auc"]

    def test_nan_output_affects_only_equal_samples(self, noisy: Predictions) -> None:
        noisy.outputs[0] = math.nan
        is_equal = noisy.feature_hashes == noisy.feature_hashes[0]
        assert torch.equal(noisy.tie_equal_samples().outputs.isnan(), is_equal)


TASKS = {
    "click": TaskSection(label="click"),
    "stars": TaskSection(label="stars", type="classes(3)"),
    "spent": TaskSection(label="spent", type="regression"),
}


@pytest.fixture
def three_tasks() -> Predictions:
    """60 samples with three labels, of which weights of 0 exclude some."""
    generator = torch.Generator().manual_seed(3)
    labels = [torch.randint(n, (60,), generator=generator) for n in (2, 3, 9)]
    outputs_NO = torch.randn(60, 5, generator=generator)
    weights_NT = torch.rand(60, 3, generator=generator) * (torch.rand(60, 3, generator=generator) < 0.7)
    labels_NT = torch.stack(labels, dim=1).float()
    return Predictions(outputs_NO, labels_NT, torch.arange(60), weights_NT, torch.arange(60) // 6)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_each_task_has_its_outputs_samples_and_weights(three_tasks: Predictions, is_weighted: bool) -> None:
    found = three_tasks.metrics(TASKS, is_weighted=is_weighted)
    assert three_tasks.weights is not None
    outputs = {"click": three_tasks.outputs[:, 0]}
    outputs |= {"stars": three_tasks.outputs[:, 1:4], "spent": three_tasks.outputs[:, 4]}
    for t, (name, task) in enumerate(TASKS.items()):
        weights_N, outputs_N = three_tasks.weights[:, t], outputs[name]
        counts_N = weights_N > 0
        expected = task_metrics(
            name,
            task,
            outputs_N[counts_N],
            three_tasks.labels[counts_N, t],
            None,
            weights_N[counts_N] if is_weighted else None,
        )
        assert {key: found[f"{name}.{key}"] for key in expected} == expected


Floats = npt.NDArray[np.float64]


def samples(seed: int, binary: bool = True, size: int = 400) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """With ties, groups of one sample, and groups of one label."""
    rng = np.random.default_rng(seed)
    scores_N = rng.integers(0, 6, size) / 8
    labels_N = (rng.random(size) < 0.3).astype(float) if binary else rng.integers(0, 4, size).astype(float)
    return scores_N, labels_N, rng.integers(-(2**62), 2**62, 90)[rng.integers(0, 90, size)]


def groups_of(
    scores_N: Floats, labels_N: Floats, groups_N: npt.NDArray[np.int64]
) -> list[tuple[Floats, Floats]]:
    return [(scores_N[groups_N == group], labels_N[groups_N == group]) for group in np.unique(groups_N)]


@pytest.mark.parametrize("seed", range(2))
def test_gauc_equals_scikit_learn_by_group(seed: int) -> None:
    from sklearn.metrics import roc_auc_score  # slow to import

    drawn = samples(seed)
    groups = [(s, y) for s, y in groups_of(*drawn) if 0 < y.sum() < len(y)]
    expected = np.average([roc_auc_score(y, s) for s, y in groups], weights=[len(y) for _, y in groups])
    assert Ranking(*drawn).gauc() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("k", [1, 3, 100])
def test_ndcg_equals_scikit_learn(k: int, binary: bool) -> None:
    from sklearn.metrics import ndcg_score  # slow to import

    drawn = samples(7, binary)
    groups = [(s, y) for s, y in groups_of(*drawn) if y.sum()]
    # It refuses groups of one sample, of which there is but one order.
    expected = np.mean([ndcg_score([y], [s], k=k) if len(y) > 1 else 1.0 for s, y in groups])
    assert Ranking(*drawn).ndcg(k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_recall_is_the_mean_over_all_orders_of_ties(k: int) -> None:
    scores_N, labels_N = np.array([0.9, 0.5, 0.5, 0.5, 0.1]), np.array([0.0, 1, 0, 1, 1])
    orders = [p for p in permutations(range(5)) if (np.diff(scores_N[list(p)]) <= 0).all()]
    expected = np.mean([labels_N[list(order[:k])].sum() / 3 for order in orders])
    found = Ranking(scores_N, labels_N, np.zeros(5, np.int64))
    assert found.recall(k) == pytest.approx(expected, abs=1e-15)


def test_mrr_is_the_mean_over_all_orders_of_ties() -> None:
    groups = {  # scores and labels; the last has no relevant sample
        7: ([3.0, 2, 1], [0.0, 1, 1]),
        2: ([5.0, 5, 5, 4], [0.0, 1, 0, 1]),
        3: ([9.0, 8, 8, 8, 8, 8], [0.0, 1, 0, 0, 2, 0]),
        9: ([1.0, 2], [0.0, 0]),
    }
    scores_N, labels_N = (np.concatenate([group[part] for group in groups.values()]) for part in (0, 1))
    groups_N = np.repeat(list(groups), [len(labels) for _, labels in groups.values()])
    expected = []
    for scores, labels in [*groups.values()][:-1]:
        orders = [p for p in permutations(range(len(scores))) if (np.diff(np.take(scores, p)) <= 0).all()]
        expected.append(np.mean([1 / (1 + np.flatnonzero(np.take(labels, p))[0]) for p in orders]))
    found = Ranking(scores_N, labels_N, groups_N).mrr()
    assert found == pytest.approx(np.mean(expected), abs=1e-15)
    two = Ranking(np.ones(2), np.array([0.0, 1.0]), np.zeros(2, np.int64))
    assert two.mrr() == pytest.approx(0.75)


def test_groups_without_order_have_no_metric() -> None:
    none = Ranking(np.array([1.0, 2.0]), np.zeros(2), np.zeros(2, np.int64))
    assert all(math.isnan(value) for value in (none.gauc(), none.ndcg(1), none.recall(1), none.mrr()))
    negative = Ranking(np.array([1.0, 2.0]), np.array([-1.0, 2.0]), np.zeros(2, np.int64))
    assert math.isnan(negative.ndcg(2))

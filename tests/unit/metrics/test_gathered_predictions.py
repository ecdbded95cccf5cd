"""Predictions of several trainers and tasks as one: ties, masks, and the order in which samples come."""

import math

import pytest
import torch
from torch import Tensor

from hybrid.batch import Batch, SparseFeatures
from hybrid.config import RunConfig, TaskSection
from hybrid.metrics import Predictions, binary_metrics

CLICKS = RunConfig().all_tasks


def _samples(size: int = 300) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits_N = torch.randn(size, generator=generator).mul(2).round(decimals=1)  # with ties
    return logits_N, (torch.rand(size, generator=generator) < logits_N.sigmoid()).float()


def _auc_by_pairs(logits_N: Tensor, labels_N: Tensor) -> float:
    positives, negatives = logits_N[labels_N == 1].tolist(), logits_N[labels_N == 0].tolist()
    wins = sum((p > n) + 0.5 * (p == n) for p in positives for n in negatives)
    return float(wins) / (len(positives) * len(negatives))


class TestPredictions:
    """Of 400 samples, most of which are there many times, with logits that differ in their last bits."""

    @pytest.fixture
    def noisy(self) -> Predictions:
        logits_N, labels_N = _samples(size=400)
        rows_N = (10 * logits_N).round().long()
        noise_N = torch.randn(400, generator=torch.Generator().manual_seed(1)) * 1e-6
        return Predictions(logits_N + noise_N, labels_N, rows_N)

    def test_equal_samples_are_tied(self, noisy: Predictions) -> None:
        clean_N = noisy.rows.double() / 10
        expected = _auc_by_pairs(clean_N, noisy.labels)
        assert noisy.metrics(CLICKS)["auc"] == pytest.approx(expected, abs=1e-15)
        assert abs(binary_metrics(noisy.outputs, noisy.labels).auc - expected) > 1e-4
        assert torch.allclose(noisy.tied().outputs.double(), clean_N, rtol=0, atol=5e-6)

    def test_metrics_are_independent_of_order_and_batches(self, noisy: Predictions) -> None:
        order_N = torch.randperm(400)
        parts = [Predictions(*(t[order_N][i : i + 37] for t in noisy[:3])) for i in range(0, 400, 37)]
        joined = Predictions.concatenate(parts)
        assert torch.equal(joined.outputs, noisy.outputs[order_N])
        assert joined.metrics(CLICKS) == pytest.approx(noisy.metrics(CLICKS), rel=1e-9)
        assert joined.metrics(CLICKS)["auc"] == noisy.metrics(CLICKS)["auc"]

    def test_equal_logits_keep_their_bits(self, noisy: Predictions) -> None:
        alone = noisy._replace(rows=torch.arange(400))
        assert torch.equal(alone.tied().outputs, alone.outputs)
        tied = noisy.tied()
        assert torch.equal(tied.tied().outputs, tied.outputs)
        assert tied.outputs.dtype == torch.float32

    def test_nan_output_affects_only_equal_samples(self, noisy: Predictions) -> None:
        noisy.outputs[0] = math.nan
        wrong_N = noisy.tied().outputs.isnan()
        assert torch.equal(wrong_N, noisy.rows == noisy.rows[0])


TASKS = {
    "click": TaskSection(label="click"),
    "stars": TaskSection(label="stars", type="classes(3)"),
    "spent": TaskSection(label="spent", type="regression"),
}


class TestTasks:
    """Of samples with three labels, of which the masks leave some out."""

    @pytest.fixture
    def of_all(self) -> Predictions:
        generator = torch.Generator().manual_seed(3)
        labels_NT = torch.stack(
            [torch.randint(n, (60,), generator=generator) for n in (2, 3, 9)], dim=1
        ).float()
        outputs_NO = torch.randn(60, 5, generator=generator)
        weights_NT = torch.rand(60, 3, generator=generator) * (torch.rand(60, 3, generator=generator) < 0.7)
        return Predictions(outputs_NO, labels_NT, torch.arange(60), weights_NT, torch.arange(60) // 6)

    def test_each_task_has_its_own_outputs_and_samples(self, of_all: Predictions) -> None:
        found = of_all.metrics(TASKS)
        assert of_all.weights is not None
        click, stars, spent = (of_all.weights[:, t] > 0 for t in range(3))
        expected = binary_metrics(of_all.outputs[click, 0], of_all.labels[click, 0])
        assert {name: found[f"click.{name}"] for name in expected.as_dict()} == expected.as_dict()
        is_right = of_all.outputs[stars, 1:4].argmax(1) == of_all.labels[stars, 1]
        assert found["stars.accuracy"] == pytest.approx(is_right.double().mean().item())
        error = of_all.outputs[spent, 4].double() - of_all.labels[spent, 2]
        assert found["spent.rmse"] == pytest.approx(error.square().mean().sqrt().item())
        assert (found["stars.num_samples"], found["spent.num_samples"]) == (
            int(stars.sum()),
            int(spent.sum()),
        )

    def test_weighted_metrics_use_the_weights_of_the_task(self, of_all: Predictions) -> None:
        assert of_all.weights is not None
        found = of_all.metrics(TASKS, is_weighted=True)
        weights_N = of_all.weights[:, 2].double()
        error_N = of_all.outputs[:, 4].double() - of_all.labels[:, 2]
        expected = ((weights_N * error_N.square()).sum() / weights_N.sum()).sqrt().item()
        assert found["spent.rmse"] == pytest.approx(expected, rel=1e-12)
        assert found["spent.num_samples"] == int((weights_N > 0).sum())
        plain = of_all.metrics(TASKS)
        different = {name for name in found if found[name] != plain[name]}
        assert different == {*plain} - {f"{task}.num_samples" for task in TASKS}

    def test_task_without_weighted_samples_has_nan_metrics(self, of_all: Predictions) -> None:
        assert of_all.weights is not None
        of_all.weights[:, 0] = 0
        for by_weight in (False, True):
            found = of_all.metrics(TASKS, is_weighted=by_weight)
            assert found["click.num_samples"] == 0
            assert math.isnan(found["click.auc"])
            assert not math.isnan(found["spent.rmse"])


def test_samples_of_weight_zero_do_not_count() -> None:
    sparse = SparseFeatures(torch.arange(3), None, None, 1)
    weights = torch.tensor([0.0, 0.5, 2.0])
    batch = Batch(torch.zeros(3, 0), sparse, torch.tensor([1.0, 0.0, 1.0]), 3, weights=weights)
    predictions = Predictions.of(batch, torch.tensor([-9.0, 0.0, 1.0]))
    found = predictions.metrics(CLICKS)
    assert (found["auc"], found["num_samples"], found["base_rate"]) == (1.0, 2, 0.5)
    found = predictions.metrics(CLICKS, is_weighted=True)
    assert (found["auc"], found["num_samples"], found["base_rate"]) == (1.0, 2, 0.8)


def test_samples_without_weights_count_once() -> None:
    logits_N, labels_N = _samples()
    predictions = Predictions(logits_N, labels_N, torch.arange(300))
    assert predictions.metrics(CLICKS, is_weighted=True) == predictions.metrics(CLICKS)

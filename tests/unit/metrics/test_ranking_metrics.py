"""Metrics of the order within groups: as scikit-learn has them group by group, and by all orders of ties."""

import math
from itertools import permutations

import numpy as np
import numpy.typing as npt
import pytest

from hybrid.metrics import Ranking

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

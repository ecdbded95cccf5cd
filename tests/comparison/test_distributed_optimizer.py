"""Two trainers with gradients 1 and 2 of one row, learning rate 1: one step of torch's, and one of ours.

torch's ``DistributedOptimizer`` takes a step for every trainer, each with optimizer state of its own; a new
release of torch that changes this fails here. Ours takes one step by the mean over the global batch, 1.5.
"""

import pytest
from comparison.cases.stock import ours, stock
from support.cluster import Clusters, RunningCluster


@pytest.fixture
def cluster(clusters: Clusters) -> RunningCluster:
    return clusters.get(4, 1)


@pytest.mark.parametrize(("optimizer", "moved"), [("sgd", -3.0), ("adagrad", -2.0), ("adam", -2.0)])
def test_stock_steps_once_for_each_trainer(optimizer: str, moved: float, cluster: RunningCluster) -> None:
    assert cluster.run(stock, optimizer) == pytest.approx(moved, abs=1e-6)


@pytest.mark.parametrize(("optimizer", "moved"), [("sgd", -1.5), ("adagrad", -1.0), ("adam", -1.0)])
def test_ours_steps_once_for_all_of_them(optimizer: str, moved: float, cluster: RunningCluster) -> None:
    assert cluster.run(ours, optimizer) == pytest.approx(moved, abs=1e-6)

"""A retrieval task on a cluster equals one process: loss, gradients and ranks among all items."""

from pathlib import Path

import pytest
from support.choices import choices_config
from support.cluster import Clusters
from support.jobs import compare, evaluate, opened

from hybrid.config import RunConfig
from hybrid.metrics import Metrics
from hybrid.storage.remote_path import StoragePath
from workers.rendezvous.bootstrap import JoinedCluster


@pytest.mark.parametrize(
    ("update", "ddp", "weight"), [("lookahead", "outside", "importance"), ("sync", "inside", "")]
)
def test_two_towers_train(update: str, ddp: str, weight: str, clusters: Clusters, tmp_path: Path) -> None:
    """The last batch of an epoch has 20 samples, with and without choices."""
    config = choices_config(
        tmp_path,
        data={"weight": weight},
        dense={"net": "two_towers", "top_mlp": [6], "ddp": ddp},
        train={"batch_size": 31, "epochs": 2, "update": update, "dtype": "float64"},
        run={"seed": 3},
    )
    clusters.get(2, 2).run(compare, config, tmp_path / "prepared", 9)


def evaluate_twice(
    cluster: JoinedCluster, config: RunConfig, cache: StoragePath, num_steps: int
) -> tuple[Metrics, Metrics]:
    """Return the metrics before and after some steps of one job."""
    with opened(cluster, config, cache) as session:
        before = session.evaluate(0)
        session.train(0, num_steps)
        return before, session.evaluate(num_steps)


def test_each_evaluation_ranks_the_items_of_that_time(clusters: Clusters, tmp_path: Path) -> None:
    config, cluster = choices_config(tmp_path), clusters.get(2, 2)
    before, after = cluster.run(evaluate_twice, config, tmp_path / "prepared", 4)
    _, expected = cluster.run(evaluate, config, tmp_path / "prepared", 4)
    assert after == expected
    assert before != after

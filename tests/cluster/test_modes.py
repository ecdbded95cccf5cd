"""The modes of DDP, asynchronous updates, and errors of a job."""

from pathlib import Path

import pytest
import torch
from support.cluster import CaseError, Clusters, RunningCluster, small_config
from support.jobs import Trained, opened, train
from torch import Tensor

from hybrid.config import RunConfig
from hybrid.transport import RemoteError, gather
from workers.controller.remote_trainer import Trainer
from workers.master import diagnose
from workers.rendezvous.bootstrap import JoinedCluster

STEPS = 4


@pytest.fixture
def cluster(clusters: Clusters) -> RunningCluster:
    return clusters.get(2, 2)


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> set[str]:
    """Return the stages in which two dense nets differ."""
    return {name.split(".")[0] for name in first if not torch.equal(first[name], second[name])}


@pytest.mark.parametrize(
    ("ddp", "private"),
    [
        pytest.param("outside", set(), marks=pytest.mark.long),
        ("inside", {"bottom"}),
        pytest.param("none", {"bottom", "head"}, marks=pytest.mark.long),
    ],
)
def test_ddp_mode_decides_which_stages_trainers_share(
    ddp: str, private: set[str], cluster: RunningCluster, cache: Path, tmp_path: Path
) -> None:
    trained = cluster.run(train, small_config(dense={"ddp": ddp}), cache, tmp_path, STEPS)
    assert differing(*trained.nets) == private
    assert trained.losses[-1] < trained.losses[0]


def test_asynchronous_updates_reduce_the_loss(cluster: RunningCluster, cache: Path, tmp_path: Path) -> None:
    trained = cluster.run(train, small_config(train={"update": "async"}), cache, tmp_path, STEPS)
    assert trained.losses[-1] < trained.losses[0]
    assert any(not torch.equal(trained.tables_before[part], trained.tables[part]) for part in trained.tables)


def train_once(cluster: object, config: RunConfig, cache: Path, scratch: Path) -> Trained:
    return train(cluster, config, cache, scratch, 1)  # type: ignore[arg-type]


def test_error_of_a_trainer_reaches_the_master(cluster: RunningCluster, cache: Path, tmp_path: Path) -> None:
    for key, value, message in (
        ("optimizer", "Adamm", "RemoteError: dense.optimizer = 'Adamm': "),
        ("net", "support.custom_nets:backward", "custom_nets.py:28, in backward: KeyError: 'gradient'"),
    ):
        with pytest.raises(CaseError) as caught:
            cluster.run(train_once, small_config(dense={key: value}), cache, tmp_path)
        assert message in str(caught.value)
    # The cluster still works after failed jobs.
    assert cluster.run(train_once, small_config(), cache, tmp_path / "again").losses[0] > 0


def train_alone(cluster: JoinedCluster, config: RunConfig, cache: Path) -> str:
    """Let only trainer 0 take steps; return the error that the master would report."""
    with opened(cluster, config, cache) as session:
        try:
            gather([session.trainers[0].call(Trainer.train, 0, 0, 2, 0)])
        except RemoteError as error:
            return str(diagnose(error, "at step 0"))
    return "no error"


def test_trainer_without_gradients_is_reported(clusters: Clusters, cache: Path) -> None:
    # Without DDP, trainers wait for each other only at the barrier of the workers.
    config = small_config(cluster={"timeout_seconds": 0.5}, dense={"ddp": "none"})
    message = clusters.get(2, 2).run(train_alone, config, cache)
    assert "trainer 1 for 0.5 s (cluster.timeout_seconds)" in message
    assert "\n" not in message


def test_tables_larger_than_memory_are_refused_before_allocation(clusters: Clusters, cache: Path) -> None:
    config = small_config(embedding={"dim": 2_000_000_000})
    with pytest.raises(CaseError, match=r"tables need [\d,.]+ GiB, .* the largest table is C"):
        clusters.get(2, 2).run(train_alone, config, cache)

"""What DDP wraps, asynchronous updates, and a dense net on a worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.cluster import CaseError, Clusters, RunningCluster, small_config
from support.jobs import Trained, train
from support.reference import Reference
from torch import Tensor

from hybrid.config import RunConfig
from hybrid.data.prepared import prepare

STEPS = 10


@pytest.fixture
def cluster(clusters: Clusters) -> RunningCluster:
    return clusters.get(2, 2)


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> set[str]:
    """The stages in which two dense nets differ."""
    return {name.split(".")[0] for name in first if not torch.equal(first[name], second[name])}


@pytest.mark.parametrize(
    ("ddp", "private"), [("outside", set()), ("inside", {"bottom"}), ("none", {"bottom", "head"})]
)
def test_ddp_mode_says_which_stages_trainers_share(
    ddp: str, private: set[str], cluster: RunningCluster, cache: Path, tmp_path: Path
) -> None:
    trained = cluster.run(train, small_config(dense={"ddp": ddp}), cache, tmp_path, STEPS)
    assert differing(*trained.nets) == private
    assert trained.losses[-1] < trained.losses[0]


def test_the_same_run_twice_gives_the_same_bits(cluster: RunningCluster, cache: Path, tmp_path: Path) -> None:
    config = small_config(
        embedding={"optimizer": "adam"}, dense={"optimizer": "Adam", "learning_rate": 0.001}
    )
    first = cluster.run(train, config, cache, tmp_path / "1", STEPS)
    second = cluster.run(train, config, cache, tmp_path / "2", STEPS)
    assert first.losses == second.losses
    assert all(torch.equal(first.tables[name], second.tables[name]) for name in first.tables)
    assert not differing(first.nets[0], second.nets[0])


def test_asynchronous_updates_learn(cluster: RunningCluster, cache: Path, tmp_path: Path) -> None:
    trained = cluster.run(train, small_config(train={"update": "async"}), cache, tmp_path, STEPS)
    assert trained.losses[-1] < trained.losses[0]
    assert any(not torch.equal(trained.initial_tables[n], trained.tables[n]) for n in trained.tables)


def remote_config(trainers: int, workers: int) -> RunConfig:
    return small_config(
        cluster={"trainers": trainers, "workers": workers},
        dense={"remote_mlp": (16, 8), "remote_worker": workers - 1},
        embedding={"optimizer": "sgd"},
    )


def test_a_remote_net_trains_as_a_local_one(clusters: Clusters, cache: Path, tmp_path: Path) -> None:
    config = remote_config(1, 2)
    trained = clusters.get(1, 2).run(train, config, cache, tmp_path, STEPS)
    reference = Reference(config, prepare(config, cache), trained.initial_tables)
    torch.testing.assert_close(trained.losses, reference.train(STEPS), rtol=1e-5, atol=1e-6)
    assert trained.remote_net.keys() == reference.remote_net.state_dict().keys()
    for name, parameter in reference.remote_net.state_dict().items():
        torch.testing.assert_close(trained.remote_net[name], parameter, rtol=1e-5, atol=1e-6)


def test_trainers_share_a_remote_net(cluster: RunningCluster, cache: Path, tmp_path: Path) -> None:
    trained = cluster.run(train, remote_config(2, 2), cache, tmp_path, STEPS)
    assert trained.losses[-1] < trained.losses[0]
    assert not differing(*trained.nets)


def train_once(cluster: object, config: RunConfig, cache: Path, scratch: Path) -> Trained:
    return train(cluster, config, cache, scratch, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"optimizer": "Adamm"},
            "RemoteError: dense.optimizer = 'Adamm': is not a class of torch.optim; did you mean 'Adam'?",
        ),
        ({"device": "cuda:99"}, "RemoteError: dense.device = 'cuda:99': this machine has"),
        ({"net": "no_such_module:build"}, "RemoteError: dense.net = 'no_such_module:build'"),
    ],
)
def test_a_trainers_error_reaches_the_master(
    section: dict[str, object], message: str, cluster: RunningCluster, cache: Path, tmp_path: Path
) -> None:
    with pytest.raises(CaseError) as caught:
        cluster.run(train_once, small_config(dense=section), cache, tmp_path)
    assert message in str(caught.value)
    # The cluster outlives a job that failed.
    assert cluster.run(train_once, small_config(), cache, tmp_path / "again").losses[0] > 0

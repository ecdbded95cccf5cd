"""Errors that the master reports when a job fails."""

import resource
from pathlib import Path

import pytest
from support.cluster import CaseError, Clusters, small_config
from support.jobs import opened

from hybrid.config import RunConfig
from hybrid.transport import RemoteError, gather
from workers.controller.remote_trainer import Trainer
from workers.master import diagnose
from workers.rendezvous.bootstrap import JoinedCluster


def train_alone(cluster: JoinedCluster, config: RunConfig, cache: Path) -> str:
    """Let only trainer 0 take steps; return the error that the master would report."""
    with opened(cluster, config, cache) as session:
        try:
            gather([session.trainers[0].call(Trainer.train, 0, 0, 2, 0)])
        except RemoteError as error:
            return str(diagnose(cluster, error, "at step 0"))
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


def save_without_room(cluster: JoinedCluster, config: RunConfig, cache: Path, folder: Path) -> None:
    """Write a checkpoint while the master cannot write to any file."""
    with opened(cluster, config, cache) as session:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            session.save(folder / "step-1", 1, 0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_failed_checkpoint_leaves_no_file(clusters: Clusters, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"CheckpointError: .*/config.toml: File too large"):
        clusters.get(2, 2).run(save_without_room, small_config(), cache, tmp_path)
    assert not list(tmp_path.iterdir())

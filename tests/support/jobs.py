"""Jobs on prepared data, for cases on clusters."""

import os
import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from hybrid.checkpoint.checkpoint_folders import DENSE_FILE
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import unpack_dense
from hybrid.config import RunConfig
from hybrid.data.prepare.preparation import ensure_prepared
from hybrid.metrics import Metrics
from hybrid.storage.remote_path import StoragePath
from workers.cluster_task import CompareTask
from workers.console import TerminalView
from workers.controller.remote_trainer import Trainer
from workers.controller.session import DatasetSession
from workers.jobs.comparison import Comparison, Snapshot, snapshot
from workers.rendezvous.bootstrap import JoinedCluster


@dataclass(frozen=True)
class Trained:
    """The result of a few steps.

    Attributes:
        losses: of each step, over all trainers.
        tables_before, tables: all rows, and their optimizer state.
        nets: the state of every trainer's dense net.
    """

    losses: list[float]
    tables_before: Snapshot
    tables: Snapshot
    nets: list[dict[str, Tensor]]


def prepared_in(config: RunConfig, cache: StoragePath) -> StoragePath:
    """Prepare the data of ``config`` in the folder ``cache``; return their folder."""
    return ensure_prepared(config.replace(data=replace(config.data, cache_folder=str(cache))))


def opened(cluster: JoinedCluster, config: RunConfig, cache: StoragePath) -> closing[DatasetSession]:
    """Open a session on a running cluster."""
    return closing(DatasetSession(cluster.topology, config, prepared_in(config, cache)))


def train(
    cluster: JoinedCluster, config: RunConfig, cache: StoragePath, scratch: Path, num_steps: int
) -> Trained:
    """Train the first steps of an epoch on a fresh job."""
    with opened(cluster, config, cache) as session:
        before = snapshot(session)
        reports = session.train(0, num_steps)
        after = snapshot(session)
        nets = []
        for index, trainer in enumerate(session.trainers):
            trainer.call(Trainer.begin_save, DENSE_FILE).wait()
            trainer.call(Trainer.write, scratch / str(index)).wait()
            nets.append(unpack_dense(load_file(scratch / str(index) / DENSE_FILE))[0])
    losses = [sum(parts) for parts in zip(*(r.losses for r in reports), strict=True)]
    return Trained(losses, before, after, nets)


def evaluate(
    cluster: JoinedCluster, config: RunConfig, cache: StoragePath, num_steps: int
) -> tuple[Snapshot, Metrics]:
    """Return all rows after the first steps of an epoch, and the metrics of the test samples."""
    with opened(cluster, config, cache) as session:
        session.train(0, num_steps)
        return snapshot(session), session.evaluate(num_steps)


def evaluate_in_two_parts(
    cluster: JoinedCluster,
    config: RunConfig,
    cache: StoragePath,
    scratch: Path,
    num_steps: int,
    later: RunConfig | None = None,
) -> tuple[Snapshot, Metrics]:
    """Do the same as :func:`evaluate`, with a checkpoint and a fresh job, of ``later``, in the middle."""
    half = num_steps // 2
    with opened(cluster, config, cache) as session:
        session.train(0, half)
        session.save(scratch / "saved", half)
    with opened(cluster, later or config, cache) as session:
        session.restore(Checkpoint.open(scratch / "saved"))
        session.train(half, num_steps - half)
        return snapshot(session), session.evaluate(num_steps)


def compare(cluster: JoinedCluster, config: RunConfig, cache: StoragePath, num_steps: int) -> None:
    """Train on the cluster and in one process; raise DifferenceError if results differ."""
    with open(os.devnull, "w", encoding="utf-8") as null, tempfile.TemporaryDirectory() as scratch:
        view = TerminalView(Console(file=null))
        Comparison(config, CompareTask(num_steps, Path(scratch) / "result")).run(
            cluster.topology, lambda: prepared_in(config, cache), view
        )

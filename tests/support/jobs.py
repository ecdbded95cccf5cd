"""Jobs that cluster cases run: train some steps, and look at what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hybrid.checkpoint import DENSE_FILE, REMOTE_FILE, Checkpoint, shard_file, unpack_dense
from hybrid.config import RunConfig
from hybrid.data.prepared import prepare
from workers.bootstrap import Cluster
from workers.session import DatasetSession


@dataclass(frozen=True)
class Trained:
    """What a few steps left behind.

    Attributes:
        losses: of each step, over all trainers.
        initial_tables, tables: rows by table, before and after.
        nets: the state of every trainer's dense net.
        remote_net: the state of the remote dense net, empty without one.
    """

    losses: list[float]
    initial_tables: dict[str, Tensor]
    tables: dict[str, Tensor]
    nets: list[dict[str, Tensor]]
    remote_net: dict[str, Tensor]


@contextmanager
def opened(cluster: Cluster, config: RunConfig, cache: Path) -> Iterator[DatasetSession]:
    """A job on a running cluster."""
    session = DatasetSession(cluster.topology, config, prepare(config, cache))
    try:
        yield session
    finally:
        session.close()


def train(cluster: Cluster, config: RunConfig, cache: Path, scratch: Path, num_steps: int) -> Trained:
    """Train the first steps of an epoch on a fresh job."""
    with opened(cluster, config, cache) as session:
        before = Checkpoint.open(session.save(scratch / "before", 0, 0))
        reports = session.train(0, 0, num_steps, 0)
        after = Checkpoint.open(session.save(scratch / "after", num_steps, 0))
        nets = []
        for index, trainer in enumerate(session.trainers):
            trainer.call("save", scratch / str(index)).wait()
            packed = Checkpoint(scratch / str(index), after.manifest).tensors(DENSE_FILE)
            nets.append(unpack_dense(packed)[0])
        remote_net = unpack_dense(after.tensors(REMOTE_FILE))[0] if config.dense.remote_mlp else {}
    losses = [sum(parts) for parts in zip(*(r.losses for r in reports), strict=True)]
    return Trained(losses, _tables(before), _tables(after), nets, remote_net)


def _tables(stored: Checkpoint) -> dict[str, Tensor]:
    tables = {}
    for name, (num_rows, dim, count) in stored.manifest.tables.items():
        tables[name] = torch.empty(num_rows, dim)
        for index in range(count):
            tables[name][index::count] = stored.tensors(shard_file(name, index, count))["weight"]
    return tables

"""A job on a cluster, from the master's side: what it has created where, and the calls to it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybrid import checkpoint, wire
from hybrid.checkpoint import Checkpoint, Manifest
from hybrid.config import RunConfig
from hybrid.config_file import to_toml
from hybrid.data import encode
from hybrid.data.encode import FeatureEncoder
from hybrid.data.storage import PreparedDataset
from hybrid.dense.nets import build_remote_net
from hybrid.embedding.placement import Placement
from hybrid.embedding.shard import TableShards
from hybrid.embedding.spec import InputSpec
from hybrid.embedding.tables import plan_tables
from hybrid.embedding.update import UpdateMode
from hybrid.errors import CheckpointError, ClusterError, ConfigError
from hybrid.metrics import Metrics, binary_metrics
from hybrid.topology import Role, RoleKind, Topology
from workers.failure import gather
from workers.trainer import Job, Report, Trainer

EVAL_STEPS_PER_CALL = 20
PING_TIMEOUT_SECONDS = 10.0
# Filling, writing and reading whole tables, and making trainers.
BULK_TIMEOUT_SECONDS = 3600.0


class RemoteMlp(nn.Sequential):
    """The remote dense net of a run, built where it lives."""

    def __init__(self, config: RunConfig, spec: InputSpec, widths: list[int]) -> None:
        super().__init__(*build_remote_net(config, spec, widths))


class Session:
    """Everything a running job has on the cluster: tables on workers, trainers, perhaps a remote net.

    Args:
        topology: the roles of the cluster.
        data_folder: the prepared data set.

    Attributes:
        steps_per_epoch: steps that pass over all training samples.
        bad_rows: reports of the rows skipped, of training and test files.
        trainers: a stub for each.
        best_auc: what no model can beat on the test samples, where the data tell; else None.
    """

    def __init__(self, topology: Topology, config: RunConfig, data_folder: Path) -> None:
        self._config = config
        self._data_folder = data_folder
        train = PreparedDataset.open(data_folder, "train")
        test = PreparedDataset.open(data_folder, "test")
        if not test.num_samples:
            raise ConfigError("data.test_fraction", "leaves no test rows; raise it, or set data.test_path")
        self.best_auc = test.report.best_auc
        self.bad_rows = (train.report.bad_rows, test.report.bad_rows)
        self.steps_per_epoch = math.ceil(train.num_samples / config.train.batch_size)
        self._test_steps = math.ceil(test.num_samples / config.train.batch_size)
        self.tables, self.placement = plan_tables(config, train.input_spec, train.ids_per_sample)
        holders = [w for w in topology.workers if self.placement.of_worker(w.index)]
        check_memory(self.placement, holders)
        self._hosts = {role.index: self._create_tables(role) for role in holders}
        self._on_workers("initialise", config.run.seed)
        self._remote_net = self._create_remote_net(train.input_spec)
        job = Job(config, data_folder, self.tables, self.placement, self._hosts, self._remote_net)
        self.trainers: list[wire.Remote[Trainer]] = gather(
            [
                wire.create(role, Trainer, role.index, job, timeout_seconds=BULK_TIMEOUT_SECONDS)
                for role in topology.trainers
            ]
        )

    def train(self, epoch: int, first_step: int, num_steps: int, steps_before: int) -> list[Report]:
        """Run some steps of an epoch on all trainers; see :meth:`Trainer.train`."""
        return self._on_trainers("train", num_steps, epoch, first_step, num_steps, steps_before)

    def evaluate(self, steps_before: int) -> Metrics:
        """Metrics over the whole test set, with the model as it is after ``steps_before`` steps."""
        reports: list[Report] = []
        for first in range(0, self._test_steps, EVAL_STEPS_PER_CALL):
            count = min(EVAL_STEPS_PER_CALL, self._test_steps - first)
            reports += self._on_trainers("evaluate", count, first, count, steps_before)
        return metrics_of(reports)

    def save(self, folder: Path, step: int, epoch: int, metrics: Metrics) -> Path:
        """Write a checkpoint: every worker its rows, trainer 0 the dense net, all at once."""
        partial = checkpoint.begin(folder)
        try:
            self._write_parts(partial)
            shapes = {t.name: (t.num_rows, t.dim, len(self.placement.of_table(t.name))) for t in self.tables}
            return checkpoint.commit(partial, Manifest(step, epoch, shapes, {}, metrics.as_dict()))
        except BaseException:
            checkpoint.discard(partial)
            raise

    def _write_parts(self, partial: Path) -> None:
        writers: list[wire.Remote[Any]] = [*self._hosts.values(), self.trainers[0]]
        gather([w.call("save", partial, timeout_seconds=BULK_TIMEOUT_SECONDS) for w in writers])
        if self._remote_net is not None:
            (state,) = gather([self._remote_net.remote().call("state_dict")])
            checkpoint.write_tensors(partial, checkpoint.REMOTE_FILE, state)
        features = self._data_folder / encode.FILE_NAME
        checkpoint.write_text(partial, encode.FILE_NAME, features.read_text(encoding="utf-8"))
        checkpoint.write_text(partial, checkpoint.CONFIG_FILE, to_toml(self._config))

    def load(self, stored: Checkpoint) -> None:
        """Go on from a checkpoint; CheckpointError where it is of another model or other data."""
        if FeatureEncoder.load(stored.folder) != FeatureEncoder.load(self._data_folder):
            raise CheckpointError(
                f"{stored.folder}: the input files have changed, their vocabulary or scaling is another; "
                "resume with the same files"
            )
        self._on_workers("load", stored.folder, stored.manifest.step)
        calls = [t.call("load", stored.folder, timeout_seconds=BULK_TIMEOUT_SECONDS) for t in self.trainers]
        if self._remote_net is not None:
            state = stored.tensors(checkpoint.REMOTE_FILE)
            calls.append(self._remote_net.remote().call("load_state_dict", state))
        gather(calls)

    def close(self) -> None:
        """End what runs in the background of the other roles."""
        parts: list[wire.Remote[Any]] = [*self.trainers, *self._hosts.values()]
        gather([part.call("close") for part in parts])

    def _on_workers(self, method: str, *args: Any) -> None:
        """Call a method of all tables, on all workers at once; it may take long."""
        gather([h.call(method, *args, timeout_seconds=BULK_TIMEOUT_SECONDS) for h in self._hosts.values()])

    def _on_trainers(self, method: str, num_steps: int, *args: Any) -> list[Report]:
        cluster = self._config.cluster
        timeout = cluster.rpc_timeout_seconds + num_steps * cluster.step_timeout_seconds
        reports: list[Report] = gather(
            [t.call(method, *args, timeout_seconds=timeout) for t in self.trainers]
        )
        return reports

    def _create_tables(self, role: Role) -> wire.RemoteTables:
        config = self._config
        rref = wire.create_module(
            role,
            TableShards,
            self.placement,
            role.index,
            config.cluster.trainers,
            UpdateMode(config.train.update),
            config.cluster.step_timeout_seconds,
        )
        return wire.RemoteTables(role, rref)

    def _create_remote_net(self, spec: InputSpec) -> wire.RemoteNet | None:
        if not self._config.dense.remote_mlp:
            return None
        role = Role(RoleKind.WORKER, self._config.dense.remote_worker)
        table_of = {f: t for t in self.tables for f in t.features}
        widths = [table_of[f.name].dim for f in spec.sparse_features]
        return wire.RemoteNet(role, wire.create_module(role, RemoteMlp, self._config, spec, widths))


def metrics_of(reports: Sequence[Report]) -> Metrics:
    """Metrics over all samples of some reports."""
    return binary_metrics(torch.cat([r.logits for r in reports]), torch.cat([r.labels for r in reports]))


def check_memory(placement: Placement, holders: Sequence[Role]) -> None:
    """Refuse tables that the workers' hosts have no memory for, before anything is allocated.

    Raises:
        ClusterError: naming the host, its workers and the largest table on them.
    """
    vitals = dict(zip(holders, gather([wire.ping(r, PING_TIMEOUT_SECONDS) for r in holders]), strict=True))
    by_host: dict[str, list[Role]] = defaultdict(list)
    for role, vital in vitals.items():
        by_host[vital.host].append(role)
    for host, roles in by_host.items():
        shards = [s for role in roles for s in placement.of_worker(role.index)]
        needed = sum(s.num_bytes for s in shards)
        available = min(vitals[role].available_bytes for role in roles)
        if needed > available:
            largest = max(shards, key=lambda s: s.num_bytes)
            names = ", ".join(str(role) for role in roles)
            raise ClusterError(
                f"{names} on {host}: tables need {_gib(needed)}, {_gib(available)} of memory are free; the "
                f"largest is {largest.table.name} with {_gib(largest.num_bytes)}: use fewer rows, a smaller "
                "embedding.dim, or more hosts"
            )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"

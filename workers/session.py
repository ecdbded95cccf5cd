"""A job on a cluster, from the master's side: what it has created where, and the calls to it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from hybrid import checkpoint, wire
from hybrid.batch import Batch
from hybrid.checkpoint import Checkpoint, Manifest
from hybrid.clock import Span
from hybrid.config import RunConfig
from hybrid.config_file import to_toml
from hybrid.config_rules import recorded_steps
from hybrid.data import encode
from hybrid.data.encode import FeatureEncoder
from hybrid.data.storage import PreparedDataset
from hybrid.dense.compiled import compiled
from hybrid.dense.nets import build_remote_net, interaction_width
from hybrid.dense.optimizer import make_optimizer
from hybrid.dense.remote import NetHost
from hybrid.embedding.placement import Placement
from hybrid.embedding.shard import TableShards
from hybrid.embedding.spec import InputSpec
from hybrid.embedding.tables import plan_tables
from hybrid.errors import CheckpointError, ClusterError, ConfigError
from hybrid.metrics import Metrics, binary_metrics
from hybrid.schedule import Schedule
from hybrid.topology import Role, RoleKind, Topology
from hybrid.update import Staleness, UpdateRules
from workers.failure import gather
from workers.profile import Profile
from workers.trainer import Job, Report, Trainer

EVAL_STEPS_PER_CALL = 20
PING_TIMEOUT_SECONDS = 10.0
# Filling, writing and reading whole tables, and making trainers.
BULK_TIMEOUT_SECONDS = 3600.0


class RemoteMlp(NetHost):
    """The remote dense net of a run, built, and compiled if it is to be, where it lives."""

    def __init__(self, config: RunConfig, spec: InputSpec, widths: list[int], rules: UpdateRules) -> None:
        dense, dtype = config.dense, getattr(torch, config.train.dtype)
        net = build_remote_net(config, spec, widths).to(dtype)
        form = None
        if dense.compile != "none":
            width = interaction_width(config, spec, widths)
            generator = torch.Generator().manual_seed(0)
            hidden_BH = torch.rand(2, width, dtype=dtype, generator=generator).requires_grad_()
            form = compiled(net, dense.compile, [hidden_BH])
        optimizer = make_optimizer(
            net.parameters(), dense.optimizer, dense.learning_rate, dense.optimizer_options
        )
        super().__init__(net, optimizer, rules, form)


class Session:
    """Everything a running job has on the cluster: tables on workers, trainers, perhaps a remote net.

    Args:
        topology: the roles of the cluster.
        input_spec: what the batches hold.
        total_steps: that the run will take in all; learning rates may depend on it.
        ids_per_sample: mean number of ids of the multi-hot features, for the placement of tables.
        data_folder: a prepared data set; None where only batches of the caller's own are trained on.

    Attributes:
        tables, placement: the tables, and where their rows are.
        trainers: a stub for each.
        recorded: the steps of which every role records what it does, as the section [profile] says;
            counted from where the session starts or goes on.
    """

    def __init__(
        self,
        topology: Topology,
        config: RunConfig,
        input_spec: InputSpec,
        total_steps: int,
        *,
        ids_per_sample: Mapping[str, float] = MappingProxyType({}),
        data_folder: Path | None = None,
    ) -> None:
        self._config = config
        self._total_steps = total_steps
        self.recorded = recorded_steps(config.profile, 0, total_steps)
        self.tables, self.placement = plan_tables(config, input_spec, ids_per_sample)
        self._rules = UpdateRules.of(config, Schedule.of(config.schedule, total_steps))
        self._dtype: torch.dtype = getattr(torch, config.train.dtype)
        holders = [w for w in topology.workers if self.placement.of_worker(w.index)]
        check_memory(self.placement, holders)
        self._hosts = {role.index: self._create_tables(role) for role in holders}
        self._on_workers("initialise", config.run.seed)
        self._remote_net = self._create_remote_net(input_spec)
        job = Job(
            config,
            input_spec,
            self.tables,
            self.placement,
            self._rules,
            self._hosts,
            self._remote_net,
            data_folder,
        )
        self.trainers: list[wire.Remote[Trainer]] = gather(
            [
                wire.create(role, Trainer, role.index, job, timeout_seconds=BULK_TIMEOUT_SECONDS)
                for role in topology.trainers
            ]
        )
        self._start_recording()

    def train_on(self, make_batches: Callable[[int], Iterable[Batch]], steps_before: int) -> list[Report]:
        """Train on batches of the caller's own; see :meth:`Trainer.train_on`.

        Args:
            make_batches: a function of a module that every trainer can import.
        """
        return self._on_trainers("train_on", BULK_TIMEOUT_SECONDS, make_batches, steps_before)

    def take_staleness(self) -> Staleness:
        """The staleness of all updates of tables since the last call."""
        return sum(gather([host.call("take_staleness") for host in self._hosts.values()]), Staleness())

    def take_profile(self) -> Profile:
        """What every role did in the recorded steps that are done; the next call has what comes after.

        ``session.take_profile().write(folder)`` leaves a trace and a table.

        Raises:
            ConfigError: there is no such step.
        """
        self._settle()
        parts = self._everything_called
        spans: dict[Role, list[Span]] = defaultdict(list)
        for part, taken in zip(parts, gather([part.call("take_spans") for part in parts]), strict=True):
            spans[part.role] += taken
        profile = Profile(spans)
        if not profile.steps:
            section = self._config.profile
            rule = f"none of the {section.steps} steps to record (profile.steps) has been taken"
            raise ConfigError("profile.first_step", rule, section.first_step)
        return profile

    def _start_recording(self) -> None:
        if self.recorded:
            gather([part.call("record", self.recorded) for part in self._everything_called])

    def save(self, folder: Path, step: int, epoch: int, metrics: Metrics | None = None) -> Path:
        """Write a checkpoint of all steps taken: every worker its rows, trainer 0 the dense net, all at once.

        Args:
            step, epoch: how many of each are done.
            metrics: of the last evaluation, if there was one.
        """
        self._settle()
        partial = checkpoint.begin(folder)
        try:
            self._write_parts(partial)
            shapes = {t.name: (t.num_rows, t.dim, len(self.placement.of_table(t.name))) for t in self.tables}
            values = {} if metrics is None else metrics.as_dict()
            return checkpoint.commit(partial, Manifest(step, epoch, shapes, {}, values))
        except BaseException:
            checkpoint.discard(partial)
            raise

    def _settle(self) -> None:
        """Return once the gradients of all steps are with the workers; updates may be under way."""
        gather([trainer.call("settle") for trainer in self.trainers])

    def _write_parts(self, partial: Path) -> None:
        writers: list[wire.Remote[Any]] = [*self._everything_hosted, self.trainers[0]]
        calls = [w.call("save", partial, timeout_seconds=BULK_TIMEOUT_SECONDS) for w in writers]
        # Those that hold the net together with trainer 0 hand it their parts.
        others = self.trainers[1 : self._config.dense.trainers_per_net]
        gather([*calls, *(t.call("save", None, timeout_seconds=BULK_TIMEOUT_SECONDS) for t in others)])
        checkpoint.write_text(partial, checkpoint.CONFIG_FILE, to_toml(self._config))

    def load(self, stored: Checkpoint) -> None:
        """Go on from a checkpoint; CheckpointError where it is of another model."""
        bulk = {"timeout_seconds": BULK_TIMEOUT_SECONDS}
        step = stored.manifest.step
        self.recorded = recorded_steps(self._config.profile, step, self._total_steps)
        calls = [host.call("load", stored.folder, step, **bulk) for host in self._everything_hosted]
        gather([*calls, *(t.call("load", stored.folder, **bulk) for t in self.trainers)])
        self._start_recording()

    @property
    def _everything_hosted(self) -> list[wire.Remote[Any]]:
        """All that workers update: their tables, and the remote net where there is one."""
        return [*self._hosts.values(), *([self._remote_net] if self._remote_net else [])]

    @property
    def _everything_called(self) -> list[wire.Remote[Any]]:
        return [*self.trainers, *self._everything_hosted]

    def close(self) -> None:
        """End what runs in the background of the other roles."""
        gather([part.call("close") for part in self._everything_called])

    def _on_workers(self, method: str, *args: Any) -> None:
        """Call a method of all tables, on all workers at once; it may take long."""
        gather([h.call(method, *args, timeout_seconds=BULK_TIMEOUT_SECONDS) for h in self._hosts.values()])

    def _on_trainers(self, method: str, timeout_seconds: float, *args: Any) -> list[Report]:
        calls = [t.call(method, *args, timeout_seconds=timeout_seconds) for t in self.trainers]
        try:
            reports: list[Report] = gather(calls)
        except ClusterError as error:
            # The trainers that wait for the one that failed learn it at once.
            for host in self._everything_hosted:
                host.call("fail", f"the run has failed: {error}")
            raise
        return reports

    def _create_tables(self, role: Role) -> wire.RemoteTables:
        wire_dtype = None if self._config.embedding.wire_dtype == "rows" else torch.bfloat16
        module = wire.create_module(
            role, TableShards, self.placement, role.index, self._rules, self._dtype, wire_dtype
        )
        return wire.RemoteTables(role, module)

    def _create_remote_net(self, spec: InputSpec) -> wire.RemoteNet | None:
        if not self._config.dense.remote_mlp:
            return None
        role = Role(RoleKind.WORKER, self._config.dense.remote_worker)
        table_of = {f: t for t in self.tables for f in t.features}
        widths = [table_of[f.name].dim for f in spec.sparse_features]
        module = wire.create_module(role, RemoteMlp, self._config, spec, widths, self._rules)
        return wire.RemoteNet(role, module)


class DatasetSession(Session):
    """A session that trains and evaluates on a prepared data set.

    Attributes:
        steps_per_epoch: steps that pass over all training samples.
        bad_rows: reports of the rows skipped, of training and test files.
        best_auc: what no model can beat on the test samples, where the data tell; else None.
        limit: the key that ends the run, ``train.epochs`` or ``train.max_steps``.
        total_steps: that the run takes.
    """

    def __init__(self, topology: Topology, config: RunConfig, data_folder: Path) -> None:
        self._data_folder = data_folder
        train = PreparedDataset.open(data_folder, "train")
        test = PreparedDataset.open(data_folder, "test")
        if not test.num_samples:
            raise ConfigError("data.test_fraction", "leaves no test rows; raise it, or set data.test_path")
        self.best_auc = test.report.best_auc
        self.bad_rows = (train.report.bad_rows, test.report.bad_rows)
        self.steps_per_epoch = math.ceil(train.num_samples / config.train.batch_size)
        self._test_steps = math.ceil(test.num_samples / config.train.batch_size)
        ends = {"train.epochs": self.steps_per_epoch * config.train.epochs}
        if config.train.max_steps:
            ends["train.max_steps"] = config.train.max_steps
        self.limit = min(ends, key=lambda key: ends[key])
        self.total_steps = ends[self.limit]
        super().__init__(
            topology,
            config,
            train.input_spec,
            self.total_steps,
            ids_per_sample=train.ids_per_sample,
            data_folder=data_folder,
        )

    def train(self, epoch: int, first_step: int, num_steps: int, steps_before: int) -> list[Report]:
        """Run some steps of an epoch on all trainers; see :meth:`Trainer.train`."""
        timeout = self._timeout_seconds(num_steps)
        return self._on_trainers("train", timeout, epoch, first_step, num_steps, steps_before)

    def evaluate(self, steps_before: int) -> Metrics:
        """Metrics over the whole test set, with the model as it is after ``steps_before`` steps."""
        reports: list[Report] = []
        for first in range(0, self._test_steps, EVAL_STEPS_PER_CALL):
            count = min(EVAL_STEPS_PER_CALL, self._test_steps - first)
            timeout = self._timeout_seconds(count)
            reports += self._on_trainers("evaluate", timeout, first, count, steps_before)
        return metrics_of(reports)

    def load(self, stored: Checkpoint) -> None:
        """Go on from a checkpoint; CheckpointError where it is of another model or other data."""
        if FeatureEncoder.load(stored.folder) != FeatureEncoder.load(self._data_folder):
            raise CheckpointError(
                f"{stored.folder}: the input files have changed, their vocabulary or scaling is another; "
                "resume with the same files"
            )
        super().load(stored)

    def _write_parts(self, partial: Path) -> None:
        super()._write_parts(partial)
        features = self._data_folder / encode.FILE_NAME
        checkpoint.write_text(partial, encode.FILE_NAME, features.read_text(encoding="utf-8"))

    def _timeout_seconds(self, num_steps: int) -> float:
        cluster = self._config.cluster
        return cluster.rpc_timeout_seconds + num_steps * cluster.step_timeout_seconds


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

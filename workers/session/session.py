"""A job on a cluster, from the master's side: what it has created where, and the calls to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar, TypeVarTuple

import torch

from hybrid import wire
from hybrid.batch import Batch
from hybrid.checkpoint.files import Files, dense_file
from hybrid.checkpoint.manifest import Manifest
from hybrid.checkpoint.reader import Checkpoint
from hybrid.clock import Span
from hybrid.config import RunConfig
from hybrid.config.file import CONFIG_FILE, load_config
from hybrid.config.rules import recorded_steps
from hybrid.data import encode
from hybrid.data.encode import FeatureEncoder
from hybrid.embedding.worker.shards import TableShards
from hybrid.errors import ClusterError, ConfigError
from hybrid.hosting.barrier import UpdateBarrier
from hybrid.hosting.hosted import Hosted
from hybrid.input_spec import InputSpec
from hybrid.metrics import Metrics
from hybrid.own_code.signature import signed_toml
from hybrid.steps.rules import Staleness, UpdateRules
from hybrid.steps.schedule import Schedule
from hybrid.topology import Role, RoleKind, Topology
from hybrid.training.build import host_remote_net
from hybrid.training.tables import place_tables
from workers.profile import Profile
from workers.session.capacity import check_memory, has_memory_for_copies
from workers.session.job import Job, Report
from workers.session.saving import NOTHING_COUNTED, Counted, Saving
from workers.session.trainer import Trainer

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

# What travels between the roles of a session, and what the master creates on them.
DATA = (Job, Report)
CREATED = (TableShards, host_remote_net, Trainer)

# Filling, writing and reading whole tables, and making trainers.
BULK_TIMEOUT_SECONDS = 3600.0


class Called(Protocol):
    """What every role has of a job: a trainer's, tables, or a remote net."""

    def record(self, steps: range) -> None: ...

    def take_spans(self) -> list[Span]: ...

    def write(self, folder: Path) -> Files: ...

    def close(self) -> None: ...


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
        meanwhile: called every now and then while trainers train or evaluate.
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
        self.meanwhile: Callable[[], object] = lambda: None
        self._config = config
        self._input_spec = input_spec
        self._data_folder = data_folder
        self._total_steps = total_steps
        self.recorded = recorded_steps(config.profile, 0, total_steps)
        self.tables, self.placement = place_tables(config, input_spec, ids_per_sample)
        self._rules = UpdateRules.of(config, Schedule.of(config.schedule, total_steps))
        self._dtype: torch.dtype = getattr(torch, config.train.dtype)
        holders = [w for w in topology.workers if self.placement.of_worker(w.index)]
        check_memory(self.placement, holders)
        self._holders = holders
        self._remote_tables = {role.index: self._create_tables(role) for role in holders}
        wire.gather(
            [
                h.call(TableShards.initialise, config.run.seed, timeout_seconds=BULK_TIMEOUT_SECONDS)
                for h in self._remote_tables.values()
            ]
        )
        self._remote_net = self._create_remote_net()
        job = Job(
            config,
            input_spec,
            self.tables,
            self.placement,
            self._rules,
            self._remote_tables,
            self._remote_net,
            data_folder,
        )
        self.trainers: list[wire.Remote[Trainer]] = wire.gather(
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
        return self._on_trainers(BULK_TIMEOUT_SECONDS, Trainer.train_on, make_batches, steps_before)

    def take_staleness(self) -> Staleness:
        """The staleness of all updates of tables since the last call."""
        return sum(
            wire.gather(
                [each.call_barrier(UpdateBarrier.take_staleness) for each in self._remote_tables.values()]
            ),
            Staleness(),
        )

    def take_profile(self) -> Profile:
        """What every role did in the recorded steps that are done; the next call has what comes after.

        ``session.take_profile().write(folder)`` leaves a trace and a table.

        Raises:
            ConfigError: there is no such step.
        """
        self._settle()
        parts = self._everything_called
        spans: dict[Role, list[Span]] = defaultdict(list)
        for part, taken in zip(
            parts, wire.gather([part.call(Called.take_spans) for part in parts]), strict=True
        ):
            spans[part.role] += taken
        profile = Profile(spans)
        if not profile.steps:
            section = self._config.profile
            rule = f"none of the {section.steps} steps to record (profile.steps) has been taken"
            raise ConfigError("profile.first_step", rule, section.first_step)
        return profile

    def _start_recording(self) -> None:
        if self.recorded:
            wire.gather([part.call(Called.record, self.recorded) for part in self._everything_called])

    def save(self, folder: Path, step: int, epoch: int, metrics: Metrics | None = None) -> Path:
        """Write a checkpoint of all steps taken: every worker its rows, trainer 0 the dense net, all at once.

        ``hybrid evaluate`` and ``hybrid predict`` read it. A model of batches of the caller's own takes the
        numbers of their files as they are, and rows of tables as ids.

        Args:
            step, epoch: how many of each are done.
            metrics: of the last evaluation, if there was one.
        """
        self.begin_save(folder, step, epoch, metrics, in_background=False).write()
        return folder

    def begin_save(
        self,
        folder: Path,
        step: int,
        epoch: int,
        metrics: Metrics | None = None,
        progress: Counted = NOTHING_COUNTED,
        in_background: bool = True,
    ) -> Saving:
        """Begin what :meth:`save` does: let every role hold what it is to write, as of the steps taken.

        It is to be written before another one begins. Training may go on meanwhile where roles hold copies
        in memory: if it is to be ``in_background``, and workers have memory for those.

        Args:
            progress: what the run has counted so far.
        """
        shapes = {t.name: (t.num_rows, t.dim, len(self.placement.of_table(t.name))) for t in self.tables}
        values = {} if metrics is None else metrics.as_dict()
        is_copied = in_background and has_memory_for_copies(self.placement, self._holders)
        self._hold(is_copied)
        writers: list[wire.Remote[Called]] = [*self._everything_hosted]
        writers += [trainer for trainer, name in zip(self.trainers, self._dense_files, strict=True) if name]
        return Saving(
            folder,
            Manifest(step, epoch, shapes, {}, values, dict(progress.values)),
            self._texts(),
            progress.reports,
            lambda partial: [
                w.call(Called.write, partial, timeout_seconds=BULK_TIMEOUT_SECONDS) for w in writers
            ],
            is_copied,
        )

    def _hold(self, is_copied: bool) -> None:
        self._settle()
        bulk = BULK_TIMEOUT_SECONDS
        calls = [
            each.call(Hosted.begin_save, is_copied, timeout_seconds=bulk) for each in self._everything_hosted
        ]
        for trainer, name in zip(self.trainers, self._dense_files, strict=True):
            calls.append(trainer.call(Trainer.begin_save, name, timeout_seconds=bulk))
        wire.gather(calls)

    @property
    def _dense_files(self) -> list[str | None]:
        """The file in which each trainer saves its net; None where another one saves the same net."""
        is_shared, size = self._config.dense.ddp == "outside", self._config.dense.trainers_per_net
        saving = range(0, 1 if is_shared else len(self.trainers), size)
        return [dense_file(index) if index in saving else None for index in range(len(self.trainers))]

    def _settle(self) -> None:
        """Return once the gradients of all steps are with the workers; updates may be under way."""
        wire.gather([trainer.call(Trainer.settle) for trainer in self.trainers])

    def _texts(self) -> dict[str, str]:
        """What a checkpoint holds besides tensors, by file."""
        folder = self._data_folder
        if folder is None:
            features = FeatureEncoder.of_rows(self._input_spec).text
        else:
            features = (folder / encode.FILE_NAME).read_text(encoding="utf-8")
        return {CONFIG_FILE: signed_toml(self._config), encode.FILE_NAME: features}

    def load(self, stored: Checkpoint) -> None:
        """Go on from a checkpoint; CheckpointError where it is of another model."""
        bulk = BULK_TIMEOUT_SECONDS
        step = stored.manifest.step
        self.recorded = recorded_steps(self._config.profile, step, self._total_steps)
        calls = [
            each.call(Hosted.load, stored.folder, step, timeout_seconds=bulk)
            for each in self._everything_hosted
        ]
        for index, trainer in enumerate(self.trainers):
            name = self._dense_file_of(index, stored)
            calls.append(trainer.call(Trainer.load, stored.folder, name, timeout_seconds=bulk))
        wire.gather(calls)
        self._start_recording()

    def _dense_file_of(self, index: int, stored: Checkpoint) -> str:
        """From which file a trainer takes its net: its own, where trainers had and have their own."""
        own = dense_file(index - index % self._config.dense.trainers_per_net)
        mode_then = load_config(stored.folder / CONFIG_FILE).dense.ddp
        is_own = own in stored.manifest.files and mode_then == self._config.dense.ddp
        return own if is_own else dense_file(0)

    @property
    def _everything_hosted(self) -> list[wire.RemoteHosted[Hosted]]:
        """All that workers update: their tables, and the remote net where there is one."""
        return [*self._remote_tables.values(), *([self._remote_net] if self._remote_net else [])]

    @property
    def _everything_called(self) -> list[wire.Remote[Called]]:
        return [*self.trainers, *self._everything_hosted]

    def close(self) -> None:
        """End what runs in the background of the other roles."""
        wire.gather([part.call(Called.close) for part in self._everything_called])

    def _on_trainers(
        self,
        timeout_seconds: float,
        method: Callable[[Trainer, *Arguments], Result],
        *args: *Arguments,
    ) -> list[Result]:
        calls = [t.call(method, *args, timeout_seconds=timeout_seconds) for t in self.trainers]
        try:
            return wire.gather(calls, lambda: self.meanwhile())
        except ClusterError as error:
            # The trainers that wait for the one that failed learn it at once.
            for each in self._everything_hosted:
                each.call_barrier(UpdateBarrier.fail, f"the run has failed: {error}")
            raise

    def _create_tables(self, role: Role) -> wire.RemoteTables:
        wire_dtype = None if self._config.embedding.wire_dtype == "rows" else torch.bfloat16
        module = wire.create_module(
            role, TableShards, self.placement, role.index, self._rules, self._dtype, wire_dtype
        )
        return wire.RemoteTables(role, module)

    def _create_remote_net(self) -> wire.RemoteNet | None:
        if not self._config.dense.remote_mlp:
            return None
        role = Role(RoleKind.WORKER, self._config.dense.remote_worker)
        module = wire.create_module(
            role, host_remote_net, self._config, self._input_spec, self.tables, self._rules
        )
        return wire.RemoteNet(role, module)

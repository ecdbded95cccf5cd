"""The objects of a job on the roles of a cluster: created, saved and loaded by the master through stubs."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid import transport
from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_manifest import (
    PROGRESS_FILE,
    Files,
    Manifest,
    dense_file,
    write_copy,
    write_text,
)
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config import DenseSection, RunConfig
from hybrid.config.loading import CONFIG_FILE, load_config
from hybrid.data.encode.vocabulary import VOCABULARIES_FILE
from hybrid.embedding.placement import Placement, Shard
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.engine.model_builder import Blueprint, host_remote_net
from hybrid.errors import CheckpointError, HybridError
from hybrid.primitives.step_timings import Span
from hybrid.protocol.update_rules import UpdateRules
from hybrid.server.hosted_module import Hosted
from hybrid.storage.remote_path import StoragePath
from hybrid.topology import Role, RoleKind, Topology
from workers.controller.remote_trainer import Trainer, TrainerJob
from workers.controller.trainer_script import Script

# To fill, write and read whole tables, and to create trainers.
BULK_TIMEOUT_SECONDS = 3600.0
_PING_TIMEOUT_SECONDS = 10.0
_MAX_FRACTION_FOR_COPIES = 0.8  # of the free memory of a host
_POLL_SECONDS = 0.02


def local_constructors(settings: Sequence[str]) -> list[partial[Any]]:
    """Return constructors of the objects to which a role adds its own settings; see :func:`with_own`."""
    classes: tuple[Callable[..., Any], ...] = (Script, Trainer)
    return [partial(each, settings=settings) for each in classes]


class Called(Protocol):
    """Methods of every object of a job: a trainer, the tables of a worker, a remote net."""

    def record(self, steps: range) -> None: ...

    def take_spans(self) -> list[Span]: ...

    def write(self, folder: StoragePath) -> Files: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Deployment:
    """The stubs of a job.

    Attributes:
        trainers: by index.
        tables: by worker, of workers that hold rows.
        remote_net: the remote dense net, or None.
    """

    trainers: Sequence[transport.Remote[Trainer]]
    tables: dict[int, transport.RemoteTables]
    remote_net: transport.RemoteNet | None

    @property
    def hosted(self) -> list[transport.RemoteHosted[Hosted]]:
        """The objects that workers update: tables, and the remote net if there is one."""
        return [*self.tables.values(), *([self.remote_net] if self.remote_net else [])]

    @property
    def everything(self) -> list[transport.Remote[Called]]:
        return [*self.trainers, *self.hosted]

    def settle(self, meanwhile: Callable[[], object]) -> None:
        """Wait until the workers have the gradients of all steps; updates may still run.

        Args:
            meanwhile: called repeatedly during the wait.
        """
        transport.gather([trainer.call(Trainer.settle) for trainer in self.trainers], meanwhile)


def deploy(
    topology: Topology,
    blueprint: Blueprint,
    placement: Placement,
    rules: UpdateRules,
    data_source: str | None,
) -> Deployment:
    """Create the tables, the trainers and the remote net of a job; see :class:`TrainerJob`."""
    tables = deploy_tables(topology, blueprint.config, placement, rules)
    dense, remote_net, bulk = blueprint.config.dense, None, BULK_TIMEOUT_SECONDS
    if dense.remote_mlp:
        role = Role(RoleKind.WORKER, 0)
        module = transport.create_module(role, host_remote_net, blueprint, rules)
        remote_net = transport.RemoteNet(role, module)
    job = TrainerJob(blueprint, placement, rules, tables, remote_net, data_source)
    trainers = [transport.create(r, Trainer, r.index, job, timeout_seconds=bulk) for r in topology.trainers]
    return Deployment(transport.gather(trainers), tables, remote_net)


def deploy_tables(
    topology: Topology, config: RunConfig, placement: Placement, rules: UpdateRules
) -> dict[int, transport.RemoteTables]:
    """Create the tables of a placement with their initial rows.

    Raises:
        HybridError: a host has no memory for its tables.
    """
    holders = [worker for worker in topology.workers if placement.of_worker(worker.index)]
    check_memory(placement, holders)
    dtype = getattr(torch, config.train.dtype)
    wire_dtype = None if config.embedding.wire_dtype == "rows" else torch.bfloat16
    tables = {}
    for role in holders:
        module = transport.create_module(role, TableShards, placement, role.index, rules, dtype, wire_dtype)
        tables[role.index] = transport.RemoteTables(role, module)
    seed, bulk = config.run.seed, BULK_TIMEOUT_SECONDS
    transport.gather([t.call(TableShards.initialise, seed, timeout_seconds=bulk) for t in tables.values()])
    return tables


class _HostMemory(NamedTuple):
    """The tables of a host and its free memory."""

    host: str
    roles: list[Role]
    shards: list[Shard]
    free_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)


def check_memory(placement: Placement, holders: Sequence[Role]) -> None:
    """Refuse tables that do not fit into the memory of the workers' hosts, before they are allocated.

    Raises:
        HybridError: names the host, its workers and their largest table.
    """
    for memory in _host_memory(placement, holders):
        if memory.num_bytes > memory.free_bytes:
            largest = max(memory.shards, key=lambda shard: shard.num_bytes)
            names = ", ".join(str(role) for role in memory.roles)
            raise HybridError(
                f"{names} on {memory.host}: tables need {_gib(memory.num_bytes)}, "
                f"{_gib(memory.free_bytes)} of memory are free; the largest is {largest.table.name} with "
                f"{_gib(largest.num_bytes)}: use fewer rows, a smaller embedding.dim, or more hosts"
            )


def has_memory_for_copies(placement: Placement, holders: Sequence[Role]) -> bool:
    """Whether every worker can hold a second copy of its tables for a while."""
    hosts = _host_memory(placement, holders)
    return all(host.num_bytes <= _MAX_FRACTION_FOR_COPIES * host.free_bytes for host in hosts)


def _host_memory(placement: Placement, holders: Sequence[Role]) -> Iterator[_HostMemory]:
    pings = [transport.ping(role, _PING_TIMEOUT_SECONDS) for role in holders]
    vitals = dict(zip(holders, transport.gather(pings), strict=True))
    by_host: dict[str, list[Role]] = defaultdict(list)
    for role, vital in vitals.items():
        by_host[vital.host].append(role)
    for host, roles in by_host.items():
        shards = [shard for role in roles for shard in placement.of_worker(role.index)]
        yield _HostMemory(host, roles, shards, min(vitals[role].available_bytes for role in roles))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


class Counted(NamedTuple):
    """The counts of a run, as a checkpoint stores them.

    Attributes:
        values: in the manifest.
        reports: in a separate file, if there are any.
    """

    values: Mapping[str, Any]
    reports: Mapping[str, Tensor]


NOTHING_COUNTED = Counted({}, {})


@dataclasses.dataclass(frozen=True)
class Saving:
    """A checkpoint whose parts the roles hold in memory until it is written.

    Attributes:
        folder: of the checkpoint.
        manifest: without the list of files.
        texts: text files, by name.
        reports: see :class:`Counted`.
        start: starts the calls that make roles write their parts into a folder and release them.
        is_copied: whether roles hold copies, so that training can continue.
        shared: vocabularies by name. The checkpoints of a run share them; other checkpoints have a copy.
    """

    folder: StoragePath
    manifest: Manifest
    texts: Mapping[str, str]
    reports: Mapping[str, Tensor]
    start: Callable[[StoragePath], Sequence[transport.Pending[Files]]]
    is_copied: bool
    shared: Mapping[str, Path] = dataclasses.field(default_factory=dict)

    def write(self) -> Manifest:
        """Write all files, complete the checkpoint, and return its manifest; in any thread.

        Raises:
            CheckpointError: a file cannot be written; the unfinished checkpoint is removed.
            RemoteError, LostError: as :meth:`hybrid.transport.Pending.wait`.
        """
        partial = checkpoint_folders.begin(self.folder)
        try:
            manifest = dataclasses.replace(self.manifest, files=self._write_files(partial))
            checkpoint_folders.commit(partial, manifest)
        except BaseException:
            checkpoint_folders.discard(partial)
            raise
        return manifest

    def _write_files(self, partial: StoragePath) -> Files:
        """Write all files; wait for every role, also after an error."""
        writers = self.start(partial.absolute())  # other roles have other working directories
        try:
            files: Files = {}
            for name, text in self.texts.items():
                files |= write_text(partial, name, text)
            for name, source in self.shared.items():
                if checkpoint_folders.belongs_to_run(self.folder):
                    checkpoint_folders.save_vocabulary(source, self.folder, name)
                else:
                    files |= write_copy(partial, VOCABULARIES_FILE, source)
            if self.reports:
                files |= write_tensors(partial, PROGRESS_FILE, self.reports)
        finally:
            for writer in writers:  # they write until they are done
                while not writer.done(_POLL_SECONDS):
                    pass
        try:
            for writer in writers:
                files |= writer.wait()
        except transport.RemoteError as error:
            if error.failure.is_users:
                raise CheckpointError(str(error)) from error
            raise
        return files


def hold(
    deployed: Deployment, dense: DenseSection, is_copied: bool, meanwhile: Callable[[], object]
) -> list[transport.Remote[Called]]:
    """Let every role hold its part of a checkpoint, as of the steps taken; return the roles with a part.

    Args:
        is_copied: whether workers hold copies.
        meanwhile: called repeatedly during the wait.
    """
    deployed.settle(meanwhile)
    bulk = BULK_TIMEOUT_SECONDS
    # A net that several trainers hold is saved by one of them.
    num_trainers = len(deployed.trainers)
    saving = range(0, 1 if dense.ddp == "outside" else num_trainers, dense.trainers_per_net)
    files = [dense_file(index) if index in saving else None for index in range(num_trainers)]
    calls = [each.call(Hosted.begin_save, is_copied, timeout_seconds=bulk) for each in deployed.hosted]
    for trainer, name in zip(deployed.trainers, files, strict=True):
        calls.append(trainer.call(Trainer.begin_save, name, timeout_seconds=bulk))
    transport.gather(calls, meanwhile)
    return [*deployed.hosted, *(t for t, name in zip(deployed.trainers, files, strict=True) if name)]


def load(deployed: Deployment, dense: DenseSection, stored: Checkpoint) -> None:
    """Make every role load its part of a checkpoint; CheckpointError if it is of another model."""
    bulk, folder = BULK_TIMEOUT_SECONDS, stored.folder
    there = folder.absolute()
    calls = [
        each.call(Hosted.load, there, stored.manifest.step, timeout_seconds=bulk) for each in deployed.hosted
    ]
    is_same_mode = load_config(stored.parts / CONFIG_FILE, is_stored=True).dense.ddp == dense.ddp
    for index, trainer in enumerate(deployed.trainers):
        own = dense_file(index - index % dense.trainers_per_net)
        name = own if is_same_mode and own in stored.manifest.files else dense_file(0)
        calls.append(trainer.call(Trainer.load, there, name, timeout_seconds=bulk))
    transport.gather(calls)

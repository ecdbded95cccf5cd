"""The objects of a job on the roles of a cluster: created, saved and loaded by the master through stubs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid import transport
from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import PROGRESS_FILE, Files, Manifest, dense_file, write_text
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config import DenseSection, RunConfig
from hybrid.config.loading import CONFIG_FILE, load_config
from hybrid.embedding.placement import Placement
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.engine.model_builder import Blueprint, host_remote_net
from hybrid.errors import CheckpointError, HybridError
from hybrid.primitives.step_timings import Span
from hybrid.storage.remote_path import StoragePath
from hybrid.topology import Role, RoleKind, Topology
from hybrid.updates.hosted_module import HostedModule
from hybrid.updates.update_rules import UpdateRules
from workers.controller.remote_trainer import Trainer

# Timeout of calls that fill, write or read full tables, or create trainers.
BULK_TIMEOUT_SECONDS = 3600.0
_PING_TIMEOUT_SECONDS = 10.0
MAX_FRACTION_FOR_COPIES = 0.8  # of a host's free memory, for a second copy of its tables
_POLL_SECONDS = 0.02


class JobObject(Protocol):
    """The methods that all objects of a job have: trainers, the tables of workers, a remote net."""

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
    def hosted(self) -> list[transport.RemoteHosted[HostedModule]]:
        """The objects that workers update: tables, and the remote net if there is one."""
        return [*self.tables.values(), *([self.remote_net] if self.remote_net else [])]

    @property
    def objects(self) -> list[transport.Remote[JobObject]]:
        """All objects of the job: the trainers, and the objects that workers update."""
        return [*self.trainers, *self.hosted]

    def flush(self, meanwhile: Callable[[], object]) -> None:
        """Wait until the workers have the gradients of all steps; updates may still run."""
        transport.gather([trainer.call(Trainer.flush) for trainer in self.trainers], meanwhile)


def deploy(
    topology: Topology,
    blueprint: Blueprint,
    placement: Placement,
    rules: UpdateRules,
    data_source: str | None,
) -> Deployment:
    """Create the tables, the trainers and the remote net of a job.

    Args:
        blueprint, placement, rules, data_source: see :class:`Trainer`.
    """
    tables = deploy_tables(topology, blueprint.config, placement, rules)
    dense = blueprint.config.dense
    remote_net = None
    bulk = BULK_TIMEOUT_SECONDS
    if dense.remote_mlp:
        role = Role(RoleKind.WORKER, 0)
        module = transport.create_module(role, host_remote_net, blueprint, rules)
        remote_net = transport.RemoteNet(role, module)
    shared = blueprint, placement, rules, tables, remote_net, data_source
    trainers = [
        transport.create(role, Trainer, role.index, *shared, timeout_seconds=bulk)
        for role in topology.trainers
    ]
    return Deployment(transport.gather(trainers), tables, remote_net)


def deploy_tables(
    topology: Topology, config: RunConfig, placement: Placement, rules: UpdateRules
) -> dict[int, transport.RemoteTables]:
    """Create the tables of a placement with their initial rows.

    Raises:
        HybridError: a host has no memory for its tables.
    """
    holders = [worker for worker in topology.workers if placement.of_worker(worker.index)]
    shortage = memory_shortage(placement, holders)
    if shortage:
        raise HybridError(shortage)
    dtype = getattr(torch, config.train.dtype)
    wire_dtype = None if config.embedding.wire_dtype == "rows" else torch.bfloat16
    tables = {}
    for role in holders:
        module = transport.create_module(role, TableShards, placement, role.index, rules, dtype, wire_dtype)
        tables[role.index] = transport.RemoteTables(role, module)
    seed = config.run.seed
    bulk = BULK_TIMEOUT_SECONDS
    transport.gather([t.call(TableShards.initialize, seed, timeout_seconds=bulk) for t in tables.values()])
    return tables


def memory_shortage(placement: Placement, holders: Sequence[Role], fraction: float = 1.0) -> str | None:
    """Return a message if tables need more than a fraction of the free memory of their workers, else None.

    A host and each control group limit the sum over the workers in it.

    Args:
        holders: the workers that hold tables.
    """
    pings = [transport.ping(role, _PING_TIMEOUT_SECONDS) for role in holders]
    vitals = dict(zip(holders, transport.gather(pings), strict=True))
    for limit in {limit: None for vital in vitals.values() for limit in vital.free_bytes}:
        roles = [role for role in holders if limit in vitals[role].free_bytes]
        shards = [shard for role in roles for shard in placement.of_worker(role.index)]
        needed = sum(shard.num_bytes for shard in shards)
        free = min(vitals[role].free_bytes[limit] for role in roles)
        if needed > fraction * free:
            largest = max(shards, key=lambda shard: shard.num_bytes)
            names = ", ".join(map(str, roles))
            host = vitals[roles[0]].host
            return (
                f"{names} on {host}: tables need {_gib(needed)}, but only {_gib(free)} of memory are free; "
                f"the largest table is {largest.table.name} with {_gib(largest.num_bytes)}. Use fewer rows, "
                "a smaller embedding.dim, or more hosts"
            )
    return None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


class StoredCounts(NamedTuple):
    """The counts of a run, as a checkpoint stores them.

    Attributes:
        values: counts in the manifest.
        reports: reports of trainers, in a separate file if there are any.
    """

    values: Mapping[str, Any]
    reports: Mapping[str, Tensor]


NO_COUNTS = StoredCounts({}, {})


@dataclasses.dataclass(frozen=True)
class HeldCheckpoint:
    """A checkpoint whose parts the roles hold in memory until it is written.

    Attributes:
        manifest: without the list of files.
        texts: text files, by name.
        reports: see :class:`StoredCounts`.
        start: starts the calls that make roles write their parts into a folder and release the memory.
        is_copied: whether roles hold copies, so that training can continue.
        shared: vocabularies by name. The checkpoints of a run share them; other checkpoints have a copy.
    """

    folder: StoragePath
    manifest: Manifest
    texts: Mapping[str, str]
    reports: Mapping[str, Tensor]
    start: Callable[[StoragePath], Sequence[transport.Pending[Files]]]
    is_copied: bool
    shared: Mapping[str, StoragePath] = dataclasses.field(default_factory=dict)

    def write(self) -> Manifest:
        """Write all files, complete the checkpoint, and return its manifest. Any thread may call this.

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
                files |= checkpoint_folders.write_vocabulary(partial, name, source)
            if self.reports:
                files |= write_tensors(partial, PROGRESS_FILE, self.reports)
        finally:
            for writer in writers:  # after an error the folder is removed, so no role may still write
                while not writer.done(_POLL_SECONDS):
                    pass
        try:
            for writer in writers:
                files |= writer.wait()
        except transport.RemoteError as error:
            if error.failure.is_self_contained:
                raise CheckpointError(str(error)) from error
            raise
        return files


def hold(
    deployed: Deployment, dense: DenseSection, is_copied: bool, meanwhile: Callable[[], object]
) -> list[transport.Remote[JobObject]]:
    """Make every role hold its part of a checkpoint after the steps taken; return the objects with a part.

    Args:
        is_copied: whether workers hold copies.
        meanwhile: see :func:`hybrid.transport.gather`.
    """
    deployed.flush(meanwhile)
    bulk = BULK_TIMEOUT_SECONDS
    # One of the trainers that hold a net together saves it.
    num_trainers = len(deployed.trainers)
    saving = range(0, 1 if dense.ddp == "outside" else num_trainers, dense.trainers_per_net)
    files = [dense_file(index) if index in saving else None for index in range(num_trainers)]
    calls = [each.call(HostedModule.begin_save, is_copied, timeout_seconds=bulk) for each in deployed.hosted]
    for trainer, name in zip(deployed.trainers, files, strict=True):
        calls.append(trainer.call(Trainer.begin_save, name, timeout_seconds=bulk))
    transport.gather(calls, meanwhile)
    return [*deployed.hosted, *(t for t, name in zip(deployed.trainers, files, strict=True) if name)]


def load(deployed: Deployment, dense: DenseSection, stored: Checkpoint) -> None:
    """Make every role load its part of a checkpoint; CheckpointError if it is of another model."""
    bulk = BULK_TIMEOUT_SECONDS
    folder = stored.folder
    path = folder.absolute()
    calls = [
        each.call(HostedModule.load, path, stored.manifest.step, timeout_seconds=bulk)
        for each in deployed.hosted
    ]
    is_same_mode = load_config(stored.files_folder / CONFIG_FILE, is_stored=True).dense.ddp == dense.ddp
    for index, trainer in enumerate(deployed.trainers):
        name = dense_file(index - index % dense.trainers_per_net)
        if not is_same_mode or name not in stored.manifest.files:
            name = dense_file(0)
        calls.append(trainer.call(Trainer.load, path, name, timeout_seconds=bulk))
    transport.gather(calls)

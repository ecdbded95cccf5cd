"""Creation of tables on workers, and checkpoints to which all roles write files."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybrid import transport
from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import PROGRESS_FILE, Files, Manifest, write_text
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config import RunConfig
from hybrid.embedding.placement import Placement
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.errors import CheckpointError, HybridError
from hybrid.storage.remote_path import StoragePath
from hybrid.topology import Role, Topology
from hybrid.updates.update_rules import UpdateRules

# Timeout of calls that fill, write or read full tables, or create trainers.
BULK_TIMEOUT_SECONDS = 3600.0
_PING_TIMEOUT_SECONDS = 10.0
_POLL_SECONDS = 0.02


def deploy_tables(
    topology: Topology, config: RunConfig, placement: Placement, rules: UpdateRules
) -> tuple[dict[int, transport.RemoteTables], Mapping[str, int]]:
    """Create the tables of a placement with their initial rows; HybridError if a host has no memory for them.

    Returns:
        Stubs of the tables, by the index of the worker; and for each table with an initial model, the number
        of rows that workers have read from the initial model.
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
    calls = [t.call(TableShards.initialize, seed, timeout_seconds=bulk) for t in tables.values()]
    matches: Counter[str] = Counter()
    for of_worker in transport.gather(calls):
        matches.update(of_worker)
    return tables, matches


def memory_shortage(placement: Placement, holders: Sequence[Role], fraction: float = 1.0) -> str | None:
    """Return a message if tables need more than ``fraction`` of the free memory of their hosts, else None."""
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


@dataclass(frozen=True)
class HeldCheckpoint:
    """A checkpoint or delta that every role is ready to write; if ``is_copied``, from copies of tensors."""

    folder: StoragePath
    manifest: Manifest  # without the list of files
    texts: Mapping[str, str]  # text files, by name
    # Reports of trainers since the last log step, in a separate file if there are any.
    reports: Mapping[str, Tensor]
    # Starts calls to all roles: a role writes its part into a folder, then releases the memory.
    start: Callable[[StoragePath], Sequence[transport.Pending[Files]]]
    is_copied: bool  # whether roles hold copies, so that training can continue
    # Vocabularies by name. All checkpoints of a run share one file; a checkpoint elsewhere gets a copy.
    shared: Mapping[str, StoragePath] = field(default_factory=dict)

    def write(self) -> Manifest:
        """Write all files, complete the checkpoint, and return its manifest. Any thread may call this.

        After an error, the unfinished checkpoint is removed.

        Raises:
            CheckpointError: the checkpoint exists, or a file cannot be written.
            StorageError: the store refuses a request of the master.
            RemoteError, LostError: a role has failed.
        """
        partial = checkpoint_folders.begin(self.folder)
        try:
            manifest = replace(self.manifest, files=self._write_files(partial))
            checkpoint_folders.commit(partial, manifest)
        except BaseException:
            checkpoint_folders.discard(partial)
            raise
        return manifest

    def _write_files(self, partial: StoragePath) -> Files:
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
            for writer in writers:  # after an error, too: no role may write after the removal
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

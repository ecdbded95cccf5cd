"""What a custom loop needs from the process it runs in: tables, the other trainers, checkpoints.

:class:`Backend` is the interface. :class:`SingleProcess` holds all tables in this process, for notebooks and
``python script.py``. The package ``workers`` has the backend of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_manifest import DENSE_FILE, Manifest, write_text
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config import RunConfig
from hybrid.config.loading import CONFIG_FILE
from hybrid.config.validation import SCHEDULES_THAT_END
from hybrid.data.prepare.dataset_location import ensure_prepared, source_of
from hybrid.data.prepare.preparation import cache_folder
from hybrid.embedding.bags import Item
from hybrid.embedding.placement import Placement, place
from hybrid.embedding.table_spec import TableSpec
from hybrid.embedding.trainer.lookup import TableSource
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.engine.update_guard import Decided
from hybrid.errors import ConfigError
from hybrid.primitives.deferred_response import PendingResult
from hybrid.protocol.learning_rate_schedule import Schedule
from hybrid.protocol.ticket import Ticket
from hybrid.protocol.update_rules import UpdateRules
from hybrid.server.barrier import UpdateBarrier
from hybrid.storage.remote_path import StoragePath
from hybrid.user_code.run_signature import signed_toml

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class PlacedTables:
    """The tables of a module, on their workers.

    Attributes:
        placement: which worker holds which rows.
        rules: how gradients become updates.
        sources: by worker, what answers its lookups.
        barriers: the update barrier of each worker.
    """

    placement: Placement
    rules: UpdateRules
    sources: Mapping[int, TableSource]
    barriers: Sequence[Decided]


class Backend(Protocol):
    """What a training loop needs from the process it runs in.

    All trainers call each method together, with the same arguments.

    Attributes:
        config: configuration of the run.
        trainer: rank of this trainer.
        group: process group of all trainers.
        is_single_process: whether there is no cluster.
        snapshot: folder of a checkpoint to write after ``train.max_steps`` steps, or None.
    """

    config: RunConfig
    trainer: int
    group: dist.ProcessGroup
    is_single_process: bool
    snapshot: Path | None

    def place_tables(self, tables: Sequence[TableSpec]) -> PlacedTables:
        """Create the tables on the workers."""
        ...

    def prepare_data(self) -> str:
        """Prepare the data of the configuration, and return what :func:`open_split` opens.

        Raises:
            ConfigError, DataError: the data cannot be prepared.
        """
        ...

    def save(self, folder: StoragePath, step: int, dense: Mapping[str, Tensor]) -> None:
        """Write a checkpoint of the tables and the module.

        Args:
            dense: the module as :func:`pack_dense` returns it; that of trainer 0 is written.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        ...

    def load(self, stored: Checkpoint) -> None:
        """Load the rows of a checkpoint.

        Raises:
            CheckpointError: the checkpoint has other tables.
        """
        ...


# Set in the thread that runs a script on a trainer of a cluster.
BACKEND: ContextVar[Backend] = ContextVar("backend")


def update_rules(config: RunConfig, num_trainers: int) -> UpdateRules:
    """Return how gradients become updates in a custom loop.

    Raises:
        ConfigError: a key does not apply to custom loops.
    """
    if config.train.micro_batches != 1:
        rule = "must be 1 in a custom training loop, whose module takes a batch as a whole"
        raise ConfigError("train.micro_batches", rule, config.train.micro_batches)
    if config.dense.ddp == "inside":
        rule = "must be outside or none in a custom training loop, whose module has no stages"
        raise ConfigError("dense.ddp", rule, "inside")
    section = config.schedule
    if section.call.name in SCHEDULES_THAT_END and not section.steps:
        rule = f'needs its steps, which only the script knows, as in "{section.call.name}(steps = 1000)"'
        raise ConfigError("schedule.kind", rule, section.kind)
    return UpdateRules.of(config, Schedule.of(section, section.steps), num_trainers)


class SingleProcess:
    """A backend without a cluster."""

    trainer = 0
    is_single_process = True

    def __init__(self, config: RunConfig, snapshot: Path | None = None) -> None:
        self.config = config
        self.snapshot = snapshot
        self.group = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]  # without a store: only its size is used
        self._shards: TableShards
        self._placement: Placement

    def place_tables(self, tables: Sequence[TableSpec]) -> PlacedTables:
        """Create the tables in this process."""
        placement = place(tables, num_workers=1)
        rules = update_rules(self.config, num_trainers=1)
        shards = TableShards(placement, 0, rules, getattr(torch, self.config.train.dtype))
        shards.initialise(self.config.run.seed)
        self._shards, self._placement = shards, placement
        local = LocalTables(shards)
        return PlacedTables(placement, rules, {0: local}, [local])

    def prepare_data(self) -> str:
        """See :meth:`Backend.prepare_data`."""
        return source_of(ensure_prepared(self.config, cache_folder(self.config), print))

    def save(self, folder: StoragePath, step: int, dense: Mapping[str, Tensor]) -> None:
        """See :meth:`Backend.save`."""
        partial = checkpoint_folders.begin(folder)
        try:
            self._shards.begin_save(is_copied=False)
            files = {
                **self._shards.write(partial),
                **write_tensors(partial, DENSE_FILE, dense),
                **write_text(partial, CONFIG_FILE, signed_toml(self.config)),
            }
            checkpoint_folders.commit(partial, Manifest(step, 0, self._placement.shapes, files))
        except BaseException:
            checkpoint_folders.discard(partial)
            raise

    def load(self, stored: Checkpoint) -> None:
        """See :meth:`Backend.load`."""
        self._shards.load(stored.folder, stored.manifest.step)


class LocalTables:
    """Tables of this process with the interface of a stub of a worker."""

    def __init__(self, shards: TableShards) -> None:
        self._shards = shards

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> Future[list[Tensor]]:
        """See :meth:`TableShards.lookup`."""
        return self._shards.lookup(ticket, items)

    def send_gradients(self, ticket: Ticket, grads: Sequence[Tensor]) -> Future[list[Tensor]]:
        """See :meth:`TableShards.receive`; the response is empty."""
        self._shards.receive(ticket, grads)
        return _completed([])

    def exchange(
        self, ticket: Ticket, grads: Sequence[Tensor], next_ticket: Ticket, items: Sequence[Item]
    ) -> Future[list[Tensor]]:
        """Take gradients, then look up."""
        self._shards.receive(ticket, grads, updates_here=True)
        return self._shards.lookup(next_ticket, items)

    def skip(self) -> Future[list[Tensor]]:
        """Do nothing."""
        return _completed([])

    def norm(self, step: int) -> PendingResult[float]:
        """See :meth:`UpdateBarrier.norm`."""
        return self._shards.barrier.norm(step)

    def call_barrier(
        self, method: Callable[[UpdateBarrier[Any], *Arguments], Result], *args: *Arguments
    ) -> PendingResult[Result]:
        """Call a method of the update barrier."""
        return _completed(method(self._shards.barrier, *args))


def _completed(value: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(value)
    return future

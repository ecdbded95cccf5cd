"""The backend of a single process, which holds all tables: for notebooks and ``python script.py``."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_files import DENSE_FILE, write_text
from hybrid.checkpoint.checkpoint_manifest import Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config import RunConfig
from hybrid.config.loading import CONFIG_FILE
from hybrid.custom_loop.backend import PlacedTables, update_rules
from hybrid.data.prepare.dataset_location import ensure_prepared, source_of
from hybrid.data.prepare.preparation import cache_folder
from hybrid.embedding.bags import Item
from hybrid.embedding.placement import Placement, place
from hybrid.embedding.table_spec import TableSpec
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.primitives.deferred_response import PendingResult
from hybrid.protocol.ticket import Ticket
from hybrid.server.barrier import UpdateBarrier
from hybrid.storage.remote_path import StoragePath
from hybrid.user_code.run_signature import signed_toml

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class SingleProcess:
    """A backend without a cluster; see :class:`hybrid.custom_loop.backend.Backend`."""

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

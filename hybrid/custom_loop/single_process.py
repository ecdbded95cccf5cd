"""This process alone, tables and all: the same loop in a notebook, in a debugger, in a script."""

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
from hybrid.custom_loop.backend import Deployed
from hybrid.custom_loop.loop_config import own_rules
from hybrid.data.prepare.dataset_location import ensure_prepared, source_of
from hybrid.data.prepare.preparation import cache_folder
from hybrid.embedding.bags import Item
from hybrid.embedding.placement import Placement, place
from hybrid.embedding.table_spec import TableSpec
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.primitives.deferred_response import Awaited
from hybrid.protocol.ticket import Ticket
from hybrid.server.barrier import UpdateBarrier
from hybrid.storage.remote_path import StoragePath
from hybrid.user_code.run_signature import signed_toml

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class Alone:
    """A host without others; see :class:`hybrid.custom_loop.backend.Host`."""

    trainer = 0
    is_alone = True

    def __init__(self, config: RunConfig, snapshot: Path | None = None) -> None:
        self.config = config
        self.snapshot = snapshot
        self.group = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]  # one without a store is of no use but to count
        self._shards: TableShards
        self._placement: Placement

    def deploy(self, tables: Sequence[TableSpec]) -> Deployed:
        """Make the tables here."""
        placement = place(tables, num_workers=1)
        rules = own_rules(self.config, num_trainers=1)
        shards = TableShards(placement, 0, rules, getattr(torch, self.config.train.dtype))
        shards.initialise(self.config.run.seed)
        self._shards, self._placement = shards, placement
        local = LocalTables(shards)
        return Deployed(placement, rules, {0: local}, [local])

    def prepare(self) -> str:
        """See :meth:`Host.prepare`."""
        return source_of(ensure_prepared(self.config, cache_folder(self.config), print))

    def save(self, folder: StoragePath, step: int, dense: Mapping[str, Tensor]) -> None:
        """See :meth:`Host.save`."""
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
        """See :meth:`Host.load`."""
        self._shards.load(stored.folder, stored.manifest.step)


class LocalTables:
    """The tables of this process, as a stub of a worker's would have them."""

    def __init__(self, shards: TableShards) -> None:
        self._shards = shards

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> Future[list[Tensor]]:
        """See :meth:`TableShards.lookup`."""
        return self._shards.lookup(ticket, items)

    def send_gradients(self, ticket: Ticket, grads: Sequence[Tensor]) -> Future[list[Tensor]]:
        """See :meth:`TableShards.receive`; the answer is empty."""
        self._shards.receive(ticket, grads)
        return _done([])

    def exchange(
        self, ticket: Ticket, grads: Sequence[Tensor], next_ticket: Ticket, items: Sequence[Item]
    ) -> Future[list[Tensor]]:
        """Both, gradients first."""
        self._shards.receive(ticket, grads, updates_here=True)
        return self._shards.lookup(next_ticket, items)

    def skip(self) -> Future[list[Tensor]]:
        """Nothing."""
        return _done([])

    def norm(self, step: int) -> Awaited[float]:
        """See :meth:`UpdateBarrier.norm`."""
        return self._shards.barrier.norm(step)

    def call_barrier(
        self, method: Callable[[UpdateBarrier[Any], *Arguments], Result], *args: *Arguments
    ) -> Awaited[Result]:
        """What a method of the update barrier returns."""
        return _done(method(self._shards.barrier, *args))


def _done(value: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(value)
    return future

"""Tables that stay in the files of a checkpoint: for predictions, by one process, of whatever size."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.futures import Future

from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.embedding.bags import Bags, Item, pool
from hybrid.embedding.placement import Placement, ShardGroup
from hybrid.errors import ClusterError
from hybrid.protocol.ticket import Ticket


class StoredTables:
    """Answers lookups from the mapped files of a checkpoint: what is read is the rows that are asked for.

    Args:
        placement: of whole tables, all on worker 0.
        stored: what they were saved in, in whatever number of shards.
        dtype: of their rows.

    Raises:
        CheckpointError: a table is not there, or has another shape.
    """

    def __init__(self, placement: Placement, stored: Checkpoint, dtype: torch.dtype) -> None:
        self._groups = placement.groups(0)
        self._dtype = dtype
        self._files = {
            shard.table.name: stored.mapped_rows(shard.table.name, shard.table.num_rows, shard.table.dim)
            for group in self._groups
            for shard in group.shards
        }

    def lookup(self, ticket: Ticket, items: Sequence[Item]) -> Future[list[Tensor]]:
        """Pooled vectors, one tensor an item; see :meth:`TableShards.lookup`."""
        answer: Future[list[Tensor]] = Future()
        answer.set_result([self._pooled(self._groups[group], bags) for group, bags in items])
        return answer

    def send_gradients(self, ticket: Ticket, grads: Sequence[Tensor]) -> NoReturn:
        """ClusterError: a checkpoint is not trained."""
        raise ClusterError("tables in a checkpoint take no gradients")

    def exchange(
        self, ticket: Ticket, grads: Sequence[Tensor], next_ticket: Ticket, items: Sequence[Item]
    ) -> NoReturn:
        """ClusterError: a checkpoint is not trained."""
        self.send_gradients(ticket, grads)

    def skip(self) -> NoReturn:
        """ClusterError: a checkpoint is not trained."""
        raise ClusterError("tables in a checkpoint take no gradients")

    def _pooled(self, group: ShardGroup, bags: Bags) -> Tensor:
        rows_U, ids_L = bags.ids_L.unique(return_inverse=True)
        offsets = None if bags.offsets is None else bags.offsets.to(ids_L.dtype)
        return pool(self._read(group, rows_U), bags._replace(ids_L=ids_L, offsets=offsets))

    def _read(self, group: ShardGroup, rows_U: Tensor) -> Tensor:
        """Rows of a group, which are in ascending order."""
        tables = [self._files[shard.table.name] for shard in group.shards]
        read_UD = torch.empty(len(rows_U), group.dim, dtype=self._dtype)
        firsts = np.searchsorted(rows_U.numpy(), [*group.starts, group.num_rows]).tolist()
        for files, start, (first, last) in zip(tables, group.starts, pairwise(firsts), strict=True):
            rows, to = rows_U[first:last].numpy() - start, read_UD[first:last].numpy()
            for index, file in enumerate(files):
                mine = rows % len(files) == index
                to[mine] = file[rows[mine] // len(files)]
        return read_UD

"""Rows as they were before an update, for the one step of a resumed run that was looked up without it.

Pipelined, the lookup of step k leaves with the gradients of step k-2, and must not see the update of step
k-1. A run that goes on from a checkpoint after step k-1 has only rows with that update, so the checkpoint has
beside them what the update has changed::

    whole run     update k-2, answer k      update k-1    update k
    checkpoint                                        ▲ rows; rows that update k-1 touched, as they were
    resumed run                                       load, answer k as of update k-2    update k
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.embedding.bags import Bags, ids_dtype, pool_recorded
from hybrid.embedding.placement import Shard, ShardGroup
from hybrid.errors import CheckpointError
from hybrid.storage.remote_path import StoragePath

# What the names of tensors in a file begin with; the rest is the name of a table.
_ROWS, _WEIGHT = "rows.", "weight."


class EarlierRows:
    """What an update has changed of the rows of one worker.

    Args:
        step: of the update.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        # By the number of a group: distinct rows of it in ascending order, and their values before.
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}

    def room(self, number: int, rows_U: Tensor, weight_RD: Tensor) -> Tensor:
        """Where the update is to copy what it overwrites of a group.

        Args:
            number: of the group.
            rows_U: distinct rows of the group in ascending order.
            weight_RD: all of its rows.
        """
        self._parts[number] = rows_U, weight_RD.new_empty(len(rows_U), weight_RD.shape[1])
        return self._parts[number][1]

    def pool_recorded(self, weight_RD: Tensor, number: int, bags: Bags) -> tuple[Tensor, Bags]:
        """As :func:`hybrid.embedding.bags.pool_recorded`, of a group as it was.

        Args:
            weight_RD, number: the rows of the group as they are, and its number.
        """
        if number not in self._parts or not len(bags.ids_L):
            return pool_recorded(weight_RD, bags)
        if bags.offsets is None:
            return self._take(weight_RD, number, bags.ids_L), bags
        rows_U, places_L = bags.ids_L.unique(return_inverse=True)
        earlier_UD = self._take(weight_RD, number, rows_U)
        pooled_BD, recorded = pool_recorded(earlier_UD, bags._replace(ids_L=places_L.to(rows_U.dtype)))
        if recorded.winners_BD is not None:
            bags = bags._replace(winners_BD=rows_U[recorded.winners_BD])
        return pooled_BD, bags

    def _take(self, weight_RD: Tensor, number: int, ids_L: Tensor) -> Tensor:
        rows_U, earlier_UD = self._parts[number]
        taken_LD = weight_RD.index_select(0, ids_L)
        if len(rows_U):
            places_L = torch.searchsorted(rows_U, ids_L).clamp_(max=len(rows_U) - 1)
            is_changed_L = rows_U[places_L] == ids_L
            taken_LD[is_changed_L] = earlier_UD[places_L[is_changed_L]]
        return taken_LD

    def tensors(self, groups: Sequence[ShardGroup]) -> dict[str, Tensor]:
        """What a file of a checkpoint has of it: of each table, which rows, and their values."""
        found: dict[str, Tensor] = {}
        for number, (rows_U, earlier_UD) in self._parts.items():
            group = groups[number]
            for shard, start in group.located:
                ends = torch.tensor([start, start + shard.num_rows], dtype=rows_U.dtype)
                first, last = torch.searchsorted(rows_U, ends).tolist()
                rows = (rows_U[first:last].long() - start) * shard.count + shard.index
                found[_ROWS + shard.table.name] = rows
                found[_WEIGHT + shard.table.name] = earlier_UD[first:last]
        return found

    @classmethod
    def read(cls, stored: Checkpoint, groups: Sequence[ShardGroup], dtype: torch.dtype) -> EarlierRows | None:
        """Those of the last update before a checkpoint, for a worker of these groups; None where it has none.

        Raises:
            CheckpointError: they are of other tables.
        """
        files = stored.pre_update_rows()
        if not files:
            return None
        earlier = cls(stored.manifest.step - 1)
        for number, group in enumerate(groups):
            found = [_of_shard(*it, file, path) for it in group.located for path, file in files.items()]
            rows_U, order_U = torch.cat([rows for rows, _ in found]).sort()
            earlier_UD = torch.cat([earlier for _, earlier in found])[order_U].to(dtype)
            earlier._parts[number] = rows_U.to(ids_dtype(group.num_rows)), earlier_UD
        return earlier


def _of_shard(
    shard: Shard, start: int, file: Mapping[str, Tensor], path: StoragePath
) -> tuple[Tensor, Tensor]:
    """What a file has of a shard that begins at row ``start`` of its group: rows of that, and values."""
    table = shard.table
    rows_U = file.get(_ROWS + table.name, torch.empty(0, dtype=torch.int64))
    earlier_UD = file.get(_WEIGHT + table.name, torch.empty(0, table.dim))
    is_list = rows_U.dtype is torch.int64 and rows_U.ndim == 1
    if not is_list or earlier_UD.shape != (len(rows_U), table.dim):
        raise CheckpointError(f"{path}: what it has of table {table.name} are no rows of it")
    is_mine_U = (rows_U % shard.count == shard.index) & (rows_U >= 0) & (rows_U < table.num_rows)
    return rows_U[is_mine_U] // shard.count + start, earlier_UD[is_mine_U]

"""Pre-update rows: rows before the last update, for the first step of a resumed run in ``pipelined`` mode.

The lookup of step k is sent with the gradients of step k-2, and must not see the update of step k-1. But the
rows of a checkpoint after step k-1 include that update. So the checkpoint also has the pre-update values of
the rows that the update has changed::

    without a stop    update k-2, look up k     update k-1    update k
    checkpoint                                            ▲ rows, and pre-update rows of update k-1
    resumed run                                           load, look up k as of update k-2    update k
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.embedding.bags import Bags, ids_dtype, pool_and_record
from hybrid.embedding.placement import Shard, ShardGroup
from hybrid.errors import CheckpointError
from hybrid.storage.remote_path import StoragePath

# Prefixes of tensor names in a file; the rest is the name of a table.
_ROWS, _WEIGHT = "rows.", "weight."


class PreUpdateRows:
    """The rows of one worker that an update has changed, with their values before the update.

    Args:
        step: step of the update.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        # For each group, by index: its changed rows in ascending order, and their previous values.
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}

    def allocate(self, number: int, rows_U: Tensor, weight_RD: Tensor) -> Tensor:
        """Return a tensor for the update to copy the rows of a group to, before it overwrites them.

        Args:
            number: index of the group.
            rows_U: distinct rows of the group, ascending.
            weight_RD: all rows of the group.
        """
        self._parts[number] = rows_U, weight_RD.new_empty(len(rows_U), weight_RD.shape[1])
        return self._parts[number][1]

    def pool_and_record(self, weight_RD: Tensor, number: int, bags: Bags) -> tuple[Tensor, Bags]:
        """Like :func:`hybrid.embedding.bags.pool_and_record`, with the values before the update.

        Args:
            weight_RD, number: current rows of the group, and its index.
        """
        if number not in self._parts or not len(bags.ids_L):
            return pool_and_record(weight_RD, bags)
        if bags.offsets is None:
            return self._take(weight_RD, number, bags.ids_L), bags
        rows_U, positions_L = bags.ids_L.unique(return_inverse=True)
        previous_UD = self._take(weight_RD, number, rows_U)
        pooled_BD, recorded = pool_and_record(previous_UD, bags._replace(ids_L=positions_L.to(rows_U.dtype)))
        if recorded.winners_BD is not None:
            bags = bags._replace(winners_BD=rows_U[recorded.winners_BD])
        return pooled_BD, bags

    def _take(self, weight_RD: Tensor, number: int, ids_L: Tensor) -> Tensor:
        rows_U, previous_UD = self._parts[number]
        taken_LD = weight_RD.index_select(0, ids_L)
        if len(rows_U):
            positions_L = torch.searchsorted(rows_U, ids_L).clamp_(max=len(rows_U) - 1)
            is_changed_L = rows_U[positions_L] == ids_L
            taken_LD[is_changed_L] = previous_UD[positions_L[is_changed_L]]
        return taken_LD

    def tensors(self, groups: Sequence[ShardGroup]) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint file: for each table, rows and their values."""
        tensors: dict[str, Tensor] = {}
        for number, (rows_U, previous_UD) in self._parts.items():
            group = groups[number]
            for shard, start in group.shard_starts:
                ends = torch.tensor([start, start + shard.num_rows], dtype=rows_U.dtype)
                first, last = torch.searchsorted(rows_U, ends).tolist()
                rows = (rows_U[first:last].long() - start) * shard.count + shard.index
                tensors[_ROWS + shard.table.name] = rows
                tensors[_WEIGHT + shard.table.name] = previous_UD[first:last]
        return tensors

    @classmethod
    def read(
        cls, stored: Checkpoint, groups: Sequence[ShardGroup], dtype: torch.dtype
    ) -> PreUpdateRows | None:
        """Read the pre-update rows of a checkpoint for a worker with these groups; None if there are none.

        Raises:
            CheckpointError: the pre-update rows do not fit the tables.
        """
        files = stored.pre_update_rows()
        if not files:
            return None
        previous = cls(stored.manifest.step - 1)
        for number, group in enumerate(groups):
            of_files = [
                _shard_rows(*each, file, path) for each in group.shard_starts for path, file in files.items()
            ]
            rows_U, order_U = torch.cat([rows for rows, _ in of_files]).sort()
            previous_UD = torch.cat([values for _, values in of_files])[order_U].to(dtype)
            previous._parts[number] = rows_U.to(ids_dtype(group.num_rows)), previous_UD
        return previous


def _shard_rows(
    shard: Shard, start: int, file: Mapping[str, Tensor], path: StoragePath
) -> tuple[Tensor, Tensor]:
    """Return the rows of a file that are in a shard, as rows of its group, and their values.

    Args:
        start: first row of the shard in the group.
    """
    table = shard.table
    rows_U = file.get(_ROWS + table.name, torch.empty(0, dtype=torch.int64))
    previous_UD = file.get(_WEIGHT + table.name, torch.empty(0, table.dim))
    is_list = rows_U.dtype is torch.int64 and rows_U.ndim == 1
    if not is_list or previous_UD.shape != (len(rows_U), table.dim):
        raise CheckpointError(f"{path}: its pre-update rows do not fit table {table.name}")
    is_in_shard_U = (rows_U % shard.count == shard.index) & (rows_U >= 0) & (rows_U < table.num_rows)
    return rows_U[is_in_shard_U] // shard.count + start, previous_UD[is_in_shard_U]

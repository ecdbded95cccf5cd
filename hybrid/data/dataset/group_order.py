"""Complete groups of rows: the order of the training rows by group, and the rows of each step.

::

    rows of the file         0 a | 1 b | 2 a | 3 c | 4 b
    group_rows.npy           0 2 | 1 4 | 3                groups in the order of their first rows
    groups permuted          1 4 | 3 | 0 2                anew in each epoch
    steps of two rows        1 4 | 3 | 0 2                the step in whose range a group's last row lies
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hybrid.config import TaskSection
from hybrid.data.dataset.prepared_dataset import PreparedDataset, positions
from hybrid.errors import ConfigError, DataError


def write_group_order(split: Path) -> None:
    """Write the rows of a split by group, if they have groups; this takes some 40 bytes a row meanwhile.

    Args:
        split: the folder of its complete arrays.
    """
    if not (split / "groups.npy").exists():
        return
    groups_N = np.load(split / "groups.npy", mmap_mode="r")
    by_number_N = groups_N.argsort(kind="stable")
    sorted_N = groups_N[by_number_N]
    starts_G1 = np.append(np.flatnonzero(np.diff(sorted_N, prepend=sorted_N[:1] - 1)), len(sorted_N))
    rows_N, sizes_G = positions(starts_G1, by_number_N[starts_G1[:-1]].argsort())
    np.save(split / "group_rows.npy", by_number_N[rows_N])
    np.save(split / "group_starts.npy", np.concatenate([[0], sizes_G.cumsum()]))


def check_ranking_losses(tasks: Mapping[str, TaskSection], dataset: PreparedDataset, batch_size: int) -> None:
    """Check that the training rows fit the ranking losses of ``tasks``, if there are any.

    Raises:
        ConfigError: a label is negative, which the loss does not allow.
        DataError: a group is larger than a batch.
    """
    for (name, task), labels in zip(tasks.items(), dataset.report.labels, strict=True):
        if task.ranking_loss.startswith("listwise") and labels.lowest is not None and labels.lowest < 0:
            rule = f"takes labels of at least 0, and a training row has {labels.lowest:g}; try pairwise"
            raise ConfigError(f"tasks.{name}.ranking_loss", rule, task.ranking_loss)
    if any(task.ranking_loss for task in tasks.values()):
        check_group_sizes(dataset, batch_size)


def check_group_sizes(dataset: PreparedDataset, batch_size: int) -> None:
    """Raise DataError if the rows are not ordered by group, or a group is larger than a batch."""
    if dataset.group_starts is None:
        raise DataError(
            "batches of complete groups need training rows, data.group, and a folder as data.cache_folder"
        )
    largest = int(np.diff(dataset.group_starts).max(initial=0))
    if largest > batch_size:
        raise DataError(
            f"the largest group of data.group has {largest:,} training rows, more than a batch of "
            f"{batch_size:,}, which has complete groups: raise train.batch_size"
        )


class GroupedOrder:
    """The rows of a split in an order of its groups; holds 16 bytes a group.

    Args:
        dataset: with rows that are ordered by group.
        groups_G: the numbers of all groups, in their order.
    """

    def __init__(self, dataset: PreparedDataset, groups_G: npt.NDArray[np.int64]) -> None:
        assert dataset.group_rows is not None, "check_group_sizes comes first"
        assert dataset.group_starts is not None
        self._rows_N, self._starts_G1 = dataset.group_rows, dataset.group_starts
        self._groups_G = groups_G
        self._ends_G = np.diff(self._starts_G1)[groups_G].cumsum()

    def indices(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the rows of the groups whose last row is at ``start`` .. ``stop`` - 1, and their ends."""
        first, last = np.searchsorted(self._ends_G, [start, stop], side="right")
        positions_B, sizes = positions(self._starts_G1, self._groups_G[first:last])
        return self._rows_N[positions_B], sizes.cumsum()

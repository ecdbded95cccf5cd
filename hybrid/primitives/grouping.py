"""Samples in groups: slices of complete groups, and the weights of samples in ranking losses.

The samples of a group are adjacent. Each range of samples has a slice: the groups that end in the range::

    groups       7 7 7 2 5 5 5 5 3      ends  3 4 8 9
    ranges      |     |     |     |
    slices       7 7 7|2    |5 5 5 5 3
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def group_ends(groups_B: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    """Return the end of each group, (G,): the index after each series of equal values in ``groups_B``."""
    if not len(groups_B):
        return np.empty(0, np.int64)
    return np.append(np.flatnonzero(groups_B[1:] != groups_B[:-1]) + 1, len(groups_B))


def find_split_group(groups_B: npt.NDArray[np.generic]) -> object | None:
    """Return the value of a group whose samples are not adjacent, or None if there is no such group."""
    runs_G = groups_B[group_ends(groups_B) - 1]
    distinct_U, counts_U = np.unique(runs_G, return_counts=True)
    return distinct_U[counts_U > 1][0].item() if len(distinct_U) < len(runs_G) else None


def last_end(ends_G: npt.NDArray[np.int64], stop: int) -> int:
    """Return the largest of ``ends_G`` that is at most ``stop``; 0 if there is none."""
    number = int(np.searchsorted(ends_G, stop, side="right"))
    return int(ends_G[number - 1]) if number else 0


def group_bounds(ends_G: npt.NDArray[np.int64], start: int, stop: int) -> tuple[int, int]:
    """Return ``(first, end)``: the samples of all groups whose last sample is in ``start : stop``."""
    return last_end(ends_G, start), last_end(ends_G, stop)


def ranking_weights(labels_B: Tensor, weights_B: Tensor | None, groups_B: Tensor) -> Tensor:
    """Return the weight of each sample in a ranking loss, (B,), float64.

    A sample of weight 0 gets 0. In each group, the mean of the positive weights is divided equally among the
    samples with positive weights. If these samples all have the same label, all get 0: no ranking exists.

    Args:
        weights_B: the weights in the data; None for all ones.
    """
    weights_B = torch.ones(len(labels_B)) if weights_B is None else weights_B
    counts_B = weights_B > 0
    weights_B = weights_B.double()
    groups_U, index_B = groups_B.unique(return_inverse=True)
    zeros_U = torch.zeros(len(groups_U), dtype=torch.float64)
    index_N = index_B[counts_B]
    labels_N = labels_B[counts_B].double()
    highest_U = (zeros_U - torch.inf).scatter_reduce(0, index_N, labels_N, "amax")
    lowest_U = (zeros_U + torch.inf).scatter_reduce(0, index_N, labels_N, "amin")
    sizes_U = index_N.bincount(minlength=len(groups_U)).clamp(min=1)
    weights_U = zeros_U.index_add(0, index_B, weights_B) / sizes_U.square()
    ranking_weights_B: Tensor = weights_U.where(highest_U > lowest_U, 0)[index_B].where(counts_B, 0)
    return ranking_weights_B


def ranking_totals(labels_BT: Tensor, weights_BT: Tensor | None, groups_B: Tensor) -> Tensor:
    """Return the sum of :func:`ranking_weights` for each task, (T,); a task is a column of the labels."""
    columns = labels_BT.unbind(1)
    weights = [None] * len(columns) if weights_BT is None else weights_BT.unbind(1)
    return torch.stack(
        [ranking_weights(*of_task, groups_B).sum() for of_task in zip(columns, weights, strict=True)]
    )

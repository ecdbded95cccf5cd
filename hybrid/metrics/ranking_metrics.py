"""Ranking metrics over groups of samples, such as the impressions of one user.

Samples are ranked by descending score. For samples with equal scores, a metric is the mean over all orders of
these samples. So metrics do not depend on the order of the samples. Groups without a label above 0 are left
out, because all orders of such a group are equally good. For GAUC, this is also true of groups whose labels
are all above 0.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Ranking:
    """N samples, in any order, that are ranked within their groups. A tie is a run of equal scores.

    Attributes:
        labels_N: the relevance of each sample, group by group, by descending scores.
        groups_N: index of the group of each sample.
        ranks_N: rank of each sample within its group, from 0.
        ties_N: index of the tie of each sample.
        group_sizes_G: samples in each group.
        tie_sizes_R, tie_labels_R: samples in each tie, and the mean of their labels.
    """

    def __init__(self, scores_N: Floats, labels_N: Floats, groups_N: Integers) -> None:
        _, groups_N = np.unique(groups_N, return_inverse=True)
        order_N = np.lexsort((-scores_N, groups_N))
        scores_N, self.labels_N, self.groups_N = scores_N[order_N], labels_N[order_N], groups_N[order_N]
        self.group_sizes_G = np.bincount(groups_N)
        starts_G = np.cumsum(self.group_sizes_G) - self.group_sizes_G
        is_first_N = np.ones(len(order_N), np.bool_)
        is_first_N[1:] = (np.diff(self.groups_N) != 0) | (scores_N[1:] != scores_N[:-1])
        self._first_R = np.flatnonzero(is_first_N)
        self.ties_N = np.cumsum(is_first_N) - 1
        self.tie_sizes_R = np.bincount(self.ties_N)
        self.tie_labels_R = _sums(self.ties_N, self.labels_N) / self.tie_sizes_R
        self.ranks_N = np.arange(len(order_N)) - starts_G[self.groups_N]

    def gauc(self) -> float:
        """Return the mean AUC of the groups, weighted by their samples (Zhou et al. 2018, equation 7)."""
        is_positive_N = self.labels_N > 0
        positives_G = _sums(self.groups_N, is_positive_N)
        pairs_G = positives_G * (self.group_sizes_G - positives_G)
        # The Mann-Whitney statistic from ranks: samples behind each positive, half of those in its tie.
        tie_ranks_N = self.ranks_N[self._first_R][self.ties_N]
        behind_N = self.group_sizes_G[self.groups_N] - tie_ranks_N - (self.tie_sizes_R[self.ties_N] + 1) / 2
        won_G = _sums(self.groups_N, np.where(is_positive_N, behind_N, 0))
        won_G -= positives_G * (positives_G - 1) / 2
        has_pairs_G = pairs_G > 0
        return _mean(won_G[has_pairs_G] / pairs_G[has_pairs_G], self.group_sizes_G[has_pairs_G])

    def ndcg(self, k: int) -> float:
        """Return the mean discounted gain of the first ``k`` samples, divided by the gain of the ideal order.

        The gain of a sample is its label divided by log2(1 + rank), with ranks from 1 (Järvelin and
        Kekäläinen 2002). The result is NaN if a label is negative.
        """
        if (self.labels_N < 0).any():
            return float("nan")
        discounts_N = np.where(self.ranks_N < k, 1 / np.log2(self.ranks_N + 2), 0)
        ideal_N = self.labels_N[np.lexsort((-self.labels_N, self.groups_N))]
        gains_G = _sums(self.groups_N, discounts_N * self.tie_labels_R[self.ties_N])
        return _mean_ratio(gains_G, _sums(self.groups_N, discounts_N * ideal_N))

    def recall(self, k: int) -> float:
        """Return the mean fraction of a group's sum of labels that its first ``k`` samples have."""
        labels_N = self.tie_labels_R[self.ties_N]
        found_G = _sums(self.groups_N, np.where(self.ranks_N < k, labels_N, 0))
        return _mean_ratio(found_G, _sums(self.groups_N, self.labels_N))

    def mrr(self) -> float:
        """Return the mean of 1 / rank (from 1) of the first sample of each group with a label above 0."""
        relevant_R = _sums(self.ties_N, self.labels_N > 0).astype(np.int64)
        has_relevant = np.flatnonzero(relevant_R)
        if not len(has_relevant):
            return float("nan")
        _, firsts = np.unique(self.groups_N[self._first_R[has_relevant]], return_index=True)
        ties_G = has_relevant[firsts]
        ranks_G = self.ranks_N[self._first_R[ties_G]]
        cases_G3 = np.stack([ranks_G, self.tie_sizes_R[ties_G], relevant_R[ties_G]], axis=1)
        cases, counts = np.unique(cases_G3, axis=0, return_counts=True)
        return _mean(np.array([_mean_reciprocal_rank(*case) for case in cases.tolist()]), counts)


def _mean_reciprocal_rank(rank: int, size: int, num_relevant: int) -> float:
    """Return the mean of 1 / rank (from 1) of the first relevant sample over all orders of a tie.

    Args:
        rank: of the first sample of the tie, from 0.
        size: samples in the tie.
        num_relevant: how many of them are relevant; at least one.
    """
    ahead = np.arange(size - num_relevant + 1)  # how many samples of the tie precede the first relevant one
    is_irrelevant = 1 - num_relevant / (size - ahead)
    probabilities = np.cumprod([1.0, *is_irrelevant[:-1]]) * num_relevant / (size - ahead)
    return float((probabilities / (rank + ahead + 1)).sum())


def _mean_ratio(values_G: Floats, totals_G: Floats) -> float:
    """Return the mean of ``values_G / totals_G`` over the groups with a total above 0."""
    is_positive_G = totals_G > 0
    return _mean(values_G[is_positive_G] / totals_G[is_positive_G], np.ones(int(is_positive_G.sum())))


def _mean(values_G: Floats, weights_G: npt.NDArray[np.float64] | Integers) -> float:
    return float(np.average(values_G, weights=weights_G)) if len(values_G) else float("nan")


def _sums(groups_N: Integers, values_N: npt.NDArray[Any]) -> Floats:
    return np.bincount(groups_N, values_N).astype(np.float64)

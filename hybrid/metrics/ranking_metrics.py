"""Metrics of the order within groups of samples, such as what one user was shown.

The first is the sample of the highest score. Where scores tie, every order of the tied samples counts alike:
no metric depends on the order in which samples come. A group with nothing to put in order is left out: one
without a label above 0, and for GAUC one whose labels are all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ranking:
    """N samples group by group, in each from the first to the last.

    Attributes:
        labels_N: what should come first has the higher one.
        groups_N: number of the group.
        ranks_N: place in the group, from 0.
        runs_N: number of the run of samples with equal scores.
        sizes_G: samples of each group.
        run_sizes_R, run_labels_R: samples of each run, and the mean of their labels.
    """

    labels_N: Floats
    groups_N: Integers
    ranks_N: Integers
    runs_N: Integers
    sizes_G: Integers
    run_sizes_R: Integers
    run_labels_R: Floats

    @classmethod
    def of(cls, scores_N: Floats, labels_N: Floats, groups_N: Integers) -> Ranking:
        """Of samples in any order."""
        _, groups_N = np.unique(groups_N, return_inverse=True)
        order_N = np.lexsort((-scores_N, groups_N))
        scores_N, labels_N, groups_N = scores_N[order_N], labels_N[order_N], groups_N[order_N]
        sizes_G = np.bincount(groups_N)
        starts_G = np.cumsum(sizes_G) - sizes_G
        is_first_N = np.ones(len(order_N), np.bool_)
        is_first_N[1:] = (np.diff(groups_N) != 0) | (scores_N[1:] != scores_N[:-1])
        runs_N = np.cumsum(is_first_N) - 1
        run_sizes_R = np.bincount(runs_N)
        run_labels_R = _sums(runs_N, labels_N) / run_sizes_R
        ranks_N = np.arange(len(order_N)) - starts_G[groups_N]
        return cls(labels_N, groups_N, ranks_N, runs_N, sizes_G, run_sizes_R, run_labels_R)

    def gauc(self) -> float:
        """The mean AUC of the groups, each by its samples (Zhou et al. 2018, equation 7)."""
        is_positive_N = self.labels_N > 0
        positives_G = _sums(self.groups_N, is_positive_N)
        pairs_G = positives_G * (self.sizes_G - positives_G)
        # How many come after a sample, of ties half: Mann and Whitney's statistic, from ranks.
        first_N = self.ranks_N[np.flatnonzero(np.diff(self.runs_N, prepend=-1))][self.runs_N]
        behind_N = self.sizes_G[self.groups_N] - first_N - (self.run_sizes_R[self.runs_N] + 1) / 2
        won_G = _sums(self.groups_N, np.where(is_positive_N, behind_N, 0))
        won_G -= positives_G * (positives_G - 1) / 2
        has_pairs_G = pairs_G > 0
        return _mean(won_G[has_pairs_G] / pairs_G[has_pairs_G], self.sizes_G[has_pairs_G])

    def ndcg(self, k: int) -> float:
        """Mean discounted gain of the first ``k``, over that of the best order (Järvelin, Kekäläinen 2002).

        A sample gains its label, over log2 of its place and 1.
        """
        if (self.labels_N < 0).any():
            return float("nan")
        discounts_N = np.where(self.ranks_N < k, 1 / np.log2(self.ranks_N + 2), 0)
        best_N = self.labels_N[np.lexsort((-self.labels_N, self.groups_N))]
        gains_G = _sums(self.groups_N, discounts_N * self.run_labels_R[self.runs_N])
        return _mean_ratio(gains_G, _sums(self.groups_N, discounts_N * best_N))

    def recall(self, k: int) -> float:
        """Mean share of a group's labels that the first ``k`` have."""
        labels_N = self.run_labels_R[self.runs_N]
        found_G = _sums(self.groups_N, np.where(self.ranks_N < k, labels_N, 0))
        return _mean_ratio(found_G, _sums(self.groups_N, self.labels_N))

    def mrr(self) -> float:
        """Mean of 1 over the place of a group's first sample with a label above 0.

        Among m tied samples, p of them such, the first is expected at place (m + 1) / (p + 1).
        """
        starts_R = np.flatnonzero(np.diff(self.runs_N, prepend=-1))
        positives_R = _sums(self.runs_N, self.labels_N > 0)
        hits = np.flatnonzero(positives_R)
        if not len(hits):
            return float("nan")
        _, first = np.unique(self.groups_N[starts_R[hits]], return_index=True)
        runs = hits[first]
        places = self.ranks_N[starts_R[runs]] + (self.run_sizes_R[runs] + 1) / (positives_R[runs] + 1)
        return float((1 / places).mean())


def _mean_ratio(found_G: Floats, most_G: Floats) -> float:
    has_most_G = most_G > 0
    return _mean(found_G[has_most_G] / most_G[has_most_G], np.ones(int(has_most_G.sum())))


def _mean(values_G: Floats, weights_G: npt.NDArray[np.float64] | Integers) -> float:
    return float(np.average(values_G, weights=weights_G)) if len(values_G) else float("nan")


def _sums(groups_N: Integers, values_N: npt.NDArray[Any]) -> Floats:
    return np.bincount(groups_N, values_N).astype(np.float64)

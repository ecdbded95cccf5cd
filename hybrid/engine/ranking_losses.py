"""Losses of the order within groups: of a user's impressions, a query's answers, a session's items.

::

    loss = sum over groups g: W_g * value_g / sum over groups g: W_g

Groups are those of the global batch that have something to put in order: two samples that count (weight
above 0) with different labels. W_g is the mean weight of the group's samples that count, and of those::

    pairwise   value = sum over pairs y_i > y_j: w_i w_j log(1 + exp(s_j - s_i))
                       / sum over these pairs: w_i w_j
    listwise   value = - sum over i: w_i y_i log softmax(s)_i / sum over i: w_i y_i

The first is RankNet's (Burges et al. 2005), the second ListNet's of the first place (Cao et al. 2007), also
called softmax cross-entropy (Bruch et al. 2019). Each sample of a group has the value of the group, and an
equal share of its weight, so that the mean over samples is that over groups; samples of other groups weigh 0.

All is computed on the CPU, where labels and groups are: sums have one order there, and so the same bits,
wherever the scores are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.errors import DataError
from hybrid.primitives.grouping import order_weights

# Of scores_B, labels_B, groups_B, and weights_B or None for all ones: values_B and their weights_B.
RankingLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def pairwise_loss(
    scores: Tensor, labels: Tensor, groups: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The logistic loss of the pairs of a group whose labels differ, and how much each sample counts.

    Args:
        scores: (samples,); what stands further in front has the larger one.
        labels: (samples,); what should stand further in front has the larger one.
        groups: (samples,), the same number for samples of one group.
        weights: (samples,), not negative; None for all ones.

    Returns:
        Values and weights, each (samples,): the weighted mean of all trainers' is the loss.
    """
    own = _Ordered.of(scores, labels, groups, weights)
    after_N = own.sizes_G.cumsum(0)[own.index_N] - torch.arange(len(own.index_N)) - 1
    front_P = torch.arange(len(after_N)).repeat_interleave(after_N)
    ends_N = after_N.cumsum(0)
    back_P = front_P + 1 + torch.arange(len(front_P)) - (ends_N - after_N)[front_P]
    signs_P = (own.labels_N[front_P] - own.labels_N[back_P]).sign()
    front_P, back_P, signs_P = (each[signs_P != 0] for each in (front_P, back_P, signs_P))
    # By index_select, whose backward pass adds in one order; that of indexing has threads that race.
    margins_P = (own.scores_N.index_select(0, front_P) - own.scores_N.index_select(0, back_P)) * signs_P
    weights_P, index_P = own.weights_N[front_P] * own.weights_N[back_P], own.index_N[front_P]
    sums_G = own.sums(-weights_P * F.logsigmoid(margins_P), index_P)
    return own.spread(sums_G / own.sums(weights_P, index_P))


def listwise_loss(
    scores: Tensor, labels: Tensor, groups: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The cross-entropy of a group's labels and the softmax of its scores, and how much each sample counts.

    Arguments and results as of :func:`pairwise_loss`.

    Raises:
        DataError: a label is negative.
    """
    own = _Ordered.of(scores, labels, groups, weights)
    if bool((own.labels_N < 0).any()):
        lowest = own.labels_N.min().item()
        raise DataError(f"a sample has the label {lowest:g}; a listwise loss takes labels of at least 0")
    lowest_G = own.scores_N.new_full((len(own.sizes_G),), -torch.inf)
    highest_G = lowest_G.scatter_reduce(0, own.index_N, own.scores_N.detach(), "amax")
    scores_N = own.scores_N - highest_G[own.index_N]
    logs_N = scores_N - own.sums(scores_N.exp(), own.index_N).log().index_select(0, own.index_N)
    gains_N = own.weights_N * own.labels_N
    return own.spread(-own.sums(gains_N * logs_N, own.index_N) / own.sums(gains_N, own.index_N))


RANKING: dict[str, RankingLoss] = {"pairwise": pairwise_loss, "listwise": listwise_loss}


class _Ordered(NamedTuple):
    """The N samples, of B, that count in groups with something to put in order, group by group.

    Attributes:
        like: the scores of the batch, (B,).
        counts_B: how much each sample of the batch counts.
        places_N: where they are in the batch.
        index_N: the number of the group of each.
        sizes_G: samples of each group.
    """

    like: Tensor
    counts_B: Tensor
    places_N: Tensor
    index_N: Tensor
    sizes_G: Tensor
    scores_N: Tensor
    labels_N: Tensor
    weights_N: Tensor

    @classmethod
    def of(cls, scores_B: Tensor, labels_B: Tensor, groups_B: Tensor, weights_B: Tensor | None) -> _Ordered:
        labels_B, groups_B = labels_B.detach().cpu(), groups_B.cpu()
        weights_B = torch.ones(len(labels_B)) if weights_B is None else weights_B.detach().cpu()
        counts_B = order_weights(labels_B, weights_B, groups_B)
        places = counts_B.nonzero().squeeze(1)
        _, index, sizes_G = groups_B[places].unique(return_inverse=True, return_counts=True)
        order_N = index.argsort(stable=True)
        places_N, dtype = places[order_N], scores_B.dtype
        labels_N, weights_N = (each[places_N].to(dtype) for each in (labels_B, weights_B))
        scores_N = scores_B.cpu().index_select(0, places_N)
        return cls(scores_B, counts_B, places_N, index[order_N], sizes_G, scores_N, labels_N, weights_N)

    def sums(self, values: Tensor, index: Tensor) -> Tensor:
        """The sums by group of some values, each of the group of its ``index``, (G,)."""
        return values.new_zeros(len(self.sizes_G)).index_add(0, index, values)

    def spread(self, values_G: Tensor) -> tuple[Tensor, Tensor]:
        """The value of its group for each sample of the batch, and how much that counts."""
        zeros_B = values_G.new_zeros(len(self.counts_B))
        values_B = zeros_B.index_copy(0, self.places_N, values_G.index_select(0, self.index_N))
        return values_B.to(self.like.device), self.counts_B.to(self.like)

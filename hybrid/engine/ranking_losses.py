"""Ranking losses over groups of samples, such as the impressions of a user or the results of a query.

::

    loss = sum over groups g: W_g * value_g / sum over groups g: W_g

A group of the global batch counts if two of its samples have weights above 0 and different labels. In such a
group, the samples with weights w above 0 count. W_g is their mean weight. With labels y and scores s::

    pairwise   value = sum over pairs y_i > y_j: w_i w_j log(1 + exp(s_j - s_i))
                       / sum over these pairs: w_i w_j
    listwise   value = - sum over i: w_i y_i log softmax(s)_i / sum over i: w_i y_i

The first is the loss of RankNet (Burges et al. 2005). The second is the top-one loss of ListNet (Cao et al.
2007), also called softmax cross-entropy (Bruch et al. 2019). Each sample gets the value of its group and an
equal fraction of W_g, so that the mean over samples is the mean over groups. All other samples have weight 0.

Everything is computed on the CPU in a fixed order, so that results are bit-identical in each run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.errors import DataError
from hybrid.primitives.grouping import ranking_weights


def pairwise_loss(
    scores: Tensor, labels: Tensor, groups: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the loss ``pairwise``: the logistic loss of pairs of samples with different labels in a group.

    Args:
        scores: (samples,), in any order. A higher score predicts a better rank.
        labels: (samples,), in the order of ``scores``. A higher label is better.
        groups: (samples,), the number of each sample's group. A group must be on one trainer.
        weights: (samples,), not negative; None for ones.

    Returns:
        Values and weights of the samples, both (samples,); the loss is their weighted mean over all trainers.
    """
    ordered = _OrderedSamples.of(scores, labels, groups, weights)
    # P are all pairs of samples of a group, the front sample before the back sample.
    after_N = ordered.sizes_G.cumsum(0)[ordered.index_N] - torch.arange(len(ordered.index_N)) - 1
    front_P = torch.arange(len(after_N)).repeat_interleave(after_N)
    ends_N = after_N.cumsum(0)
    back_P = front_P + 1 + torch.arange(len(front_P)) - (ends_N - after_N)[front_P]
    signs_P = (ordered.labels_N[front_P] - ordered.labels_N[back_P]).sign()
    front_P, back_P, signs_P = (each[signs_P != 0] for each in (front_P, back_P, signs_P))
    # By index_select: the backward pass of indexing adds in an order that depends on threads.
    margins_P = (
        ordered.scores_N.index_select(0, front_P) - ordered.scores_N.index_select(0, back_P)
    ) * signs_P
    weights_P, index_P = ordered.weights_N[front_P] * ordered.weights_N[back_P], ordered.index_N[front_P]
    sums_G = ordered.sums(-weights_P * F.logsigmoid(margins_P), index_P)
    return ordered.spread(sums_G / ordered.sums(weights_P, index_P))


def listwise_loss(
    scores: Tensor, labels: Tensor, groups: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the loss ``listwise``: the cross-entropy between labels and softmax scores in each group.

    Arguments and results are as in :func:`pairwise_loss`.

    Raises:
        DataError: a sample with a weight above 0 in the result has a negative label.
    """
    ordered = _OrderedSamples.of(scores, labels, groups, weights)
    if bool((ordered.labels_N < 0).any()):
        lowest = ordered.labels_N.min().item()
        raise DataError(f"a sample has the label {lowest:g}; a listwise loss takes labels of at least 0")
    lowest_G = ordered.scores_N.new_full((len(ordered.sizes_G),), -torch.inf)
    highest_G = lowest_G.scatter_reduce(0, ordered.index_N, ordered.scores_N.detach(), "amax")
    scores_N = ordered.scores_N - highest_G[ordered.index_N]
    logs_N = scores_N - ordered.sums(scores_N.exp(), ordered.index_N).log().index_select(0, ordered.index_N)
    gains_N = ordered.weights_N * ordered.labels_N
    return ordered.spread(
        -ordered.sums(gains_N * logs_N, ordered.index_N) / ordered.sums(gains_N, ordered.index_N)
    )


RANKING = {"pairwise": pairwise_loss, "listwise": listwise_loss}


class _OrderedSamples(NamedTuple):
    """The N of the B samples of a batch that count in a ranking loss, sorted by their G groups.

    ``samples_N`` are the indices of these samples in the batch, and ``index_N`` the indices of their groups.
    ``weights_N`` are the weights w of the module, and ``sample_weights_B`` are the samples' fractions of W_g.
    """

    scores_B: Tensor  # whose device and type the results have
    sample_weights_B: Tensor
    samples_N: Tensor
    index_N: Tensor
    sizes_G: Tensor
    scores_N: Tensor
    labels_N: Tensor
    weights_N: Tensor

    @classmethod
    def of(
        cls, scores_B: Tensor, labels_B: Tensor, groups_B: Tensor, weights_B: Tensor | None
    ) -> _OrderedSamples:
        labels_B, groups_B = labels_B.detach().cpu(), groups_B.cpu()
        weights_B = torch.ones(len(labels_B)) if weights_B is None else weights_B.detach().cpu()
        sample_weights_B = ranking_weights(labels_B, weights_B, groups_B)
        samples = sample_weights_B.nonzero().squeeze(1)
        _, index, sizes_G = groups_B[samples].unique(return_inverse=True, return_counts=True)
        order_N = index.argsort(stable=True)
        samples_N, dtype = samples[order_N], scores_B.dtype
        labels_N, weights_N = (each[samples_N].to(dtype) for each in (labels_B, weights_B))
        scores_N = scores_B.cpu().index_select(0, samples_N)
        return cls(
            scores_B, sample_weights_B, samples_N, index[order_N], sizes_G, scores_N, labels_N, weights_N
        )

    def sums(self, values: Tensor, index: Tensor) -> Tensor:
        return values.new_zeros(len(self.sizes_G)).index_add(0, index, values)

    def spread(self, values_G: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and weights of all samples of the batch. A sample has the value of its group."""
        zeros_B = values_G.new_zeros(len(self.sample_weights_B))
        values_B = zeros_B.index_copy(0, self.samples_N, values_G.index_select(0, self.index_N))
        return values_B.to(self.scores_B.device), self.sample_weights_B.to(self.scores_B)

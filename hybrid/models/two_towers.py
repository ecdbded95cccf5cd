"""Two towers for retrieval: user and item vectors in one space, trained with sampled negatives.

A score is the dot product of the outputs of a user tower u() and an item tower v(). A nearest-neighbor index
thus finds the best of millions of items. A softmax over all items would be too expensive, so the loss
compares the item of a sample with N negatives. Each negative is item i with probability q(i). Frequent items
are negatives more often, which would lower their scores. Subtracting log q in training corrects this::

    s(x, i)  = u(x) . v(i) / temperature                     for serving
    loss(x, i) = -log  exp(s(x, i) - log q(i)) / sum over i and all negatives j of exp(s(x, j) - log q(j))

:func:`in_batch_softmax` takes the items of the other samples as negatives (Yi et al. 2019,
"Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", section 3). Such negatives
cost no lookups. q(i) is the frequency of item i in the training data, which :func:`log_popularity` counts;
the paper estimates it from a stream. :func:`sampled_softmax` takes items that ``hybrid.Negatives`` draws with
probabilities of your choice, so rare items can be negatives, too.

With independent draws from q, the same scores minimize the loss for any N: the scores of a softmax over all
items (Ma and Collins 2018, "Noise Contrastive Estimation and Negative Sampling for Conditional Models"). So
a negative stays in the sum even if it equals the item of the sample. Otherwise, the scores of frequent items
would be too high.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybrid.models.layers import mlp


class Tower(nn.Module):
    """The net of users or the net of items; it returns vectors (B, ``dim``) of norm 1."""

    def __init__(self, width: int, hidden: Sequence[int], dim: int) -> None:
        super().__init__()
        self.layers = mlp((width, *hidden), dim)

    def forward(self, inputs_BH: Tensor) -> Tensor:
        return F.normalize(self.layers(inputs_BH), dim=1)


class TwoTowers(nn.Module):
    """The model: both towers.

    Args:
        user_width, item_width: width of the inputs of each tower.
        hidden: hidden units of each tower.
        dim: D, the width of the output vectors.
    """

    def __init__(
        self, user_width: int, item_width: int, hidden: Sequence[int] = (64,), dim: int = 32
    ) -> None:
        super().__init__()
        self.user = Tower(user_width, hidden, dim)
        self.item = Tower(item_width, hidden, dim)

    def forward(self, users_BH: Tensor, items_BH: Tensor) -> tuple[Tensor, Tensor]:
        return self.user(users_BH), self.item(items_BH)


class TowerInputs(nn.Module):
    """The interaction of the net "two_towers": the inputs of the user tower, then of the item tower.

    Args:
        start, dim: first column and width of the item's vector in ``pooled_BE``. The user tower gets
            ``bottom_BH`` and all other columns of ``pooled_BE``.
    """

    def __init__(self, start: int, dim: int) -> None:
        super().__init__()
        self.start, self.end = start, start + dim

    def forward(self, bottom_BH: Tensor, pooled_BE: Tensor) -> Tensor:
        before, item, after = pooled_BE.tensor_split([self.start, self.end], dim=1)
        return torch.cat([bottom_BH, before, after, item], dim=1)


class TowerHead(nn.Module):
    """The head of the net "two_towers": a user vector and an item vector of each sample, side by side."""

    def __init__(self, user_width: int, item_width: int, hidden: Sequence[int], dim: int) -> None:
        super().__init__()
        self.user_width = user_width
        self.user = Tower(user_width, hidden, dim)
        self.item = Tower(item_width, hidden, dim)

    def forward(self, hidden_BH: Tensor) -> Tensor:
        users_BH, items_BH = hidden_BH.tensor_split([self.user_width], dim=1)
        return torch.cat([self.user(users_BH), self.item(items_BH)], dim=1)


def log_popularity(ids: Tensor, num_items: int) -> Tensor:
    """Return ``log_q_I``, the logarithm of the frequency of each item in the training data's ``ids``.

    An item that is not in the data counts as if it occurred once.

    Raise ValueError if there are no ids, or an id is not in 0 to ``num_items - 1``.
    """
    if not ids.numel() or not 0 <= int(ids.min()) <= int(ids.max()) < num_items:
        raise ValueError(f"ids must be some of 0 to {num_items - 1}")
    return log_frequency(torch.bincount(ids.flatten(), minlength=num_items))


def log_frequency(counts_I: Tensor) -> Tensor:
    """Return the logarithms of the frequencies of items from their counts; a count of 0 is replaced by 1."""
    return torch.log(counts_I.clamp(min=1) / counts_I.sum())


def in_batch_softmax(
    users_BD: Tensor,
    items_BD: Tensor,
    log_q_B: Tensor,
    temperature: float = 0.1,
    gather: Callable[[Tensor], Tensor] = lambda values: values,
) -> Tensor:
    """Return ``losses_B``, the corrected loss of each sample; the negatives are the other samples' items.

    Args:
        users_BD, items_BD: the outputs of the towers for each sample.
        log_q_B: logarithm of the frequency of each item; zeros for no correction.
        temperature: divides the scores.
        gather: ``cluster.gather``, which makes the items of all trainers' slices negatives. By default, only
            items of ``items_BD`` are negatives, so the loss depends on the number of trainers.
    """
    items_ND, log_q_N = (gather(each).to(users_BD.device) for each in (items_BD, log_q_B))
    scores_BN = users_BD @ items_ND.mT / temperature - log_q_N.to(users_BD)
    return scores_BN.logsumexp(dim=1) - _positives(users_BD, items_BD, log_q_B, temperature)


def sampled_softmax(
    users_BD: Tensor,
    items_BD: Tensor,
    log_q_B: Tensor,
    negatives_ND: Tensor,
    negative_log_q_N: Tensor,
    temperature: float = 0.1,
) -> Tensor:
    """Return ``losses_B``, the corrected loss of each sample; all samples have the same N negatives.

    Args:
        users_BD, items_BD: the outputs of the towers for each sample.
        log_q_B: log q(i) for the item of each sample, plus any constant.
        negatives_ND: the outputs of the item tower for the negatives.
        negative_log_q_N: log q(i) for each negative, plus the same constant.
        temperature: divides the scores.
    """
    positive_B = _positives(users_BD, items_BD, log_q_B, temperature)
    scores_BN = users_BD @ negatives_ND.mT / temperature - negative_log_q_N.to(users_BD)
    return torch.cat([positive_B.unsqueeze(1), scores_BN], dim=1).logsumexp(dim=1) - positive_B


def _positives(users_BD: Tensor, items_BD: Tensor, log_q_B: Tensor, temperature: float) -> Tensor:
    return (users_BD * items_BD).sum(dim=1) / temperature - log_q_B.to(users_BD)


def top_items(
    users_BD: Tensor, item_vectors: Callable[[Tensor], Tensor], num_items: int, k: int, chunk: int = 4096
) -> Tensor:
    """Return ``ids_BK`` on the CPU, the k items with the highest scores for each user, the best first.

    The result is exact, over all items. Users and items are scored in blocks of ``chunk`` x ``chunk``. On a
    cluster, each trainer calls this for the users of its slice.

    Args:
        users_BD: user vectors; B may exceed the batch size.
        item_vectors: returns vectors (C, D) of ids (C,) on the CPU: ``lambda ids: tower(table(ids))``.
        num_items: the ids are 0 to ``num_items - 1``.

    Raises:
        ValueError: ``k`` is not in 1 to ``num_items``.
    """
    if not 1 <= k <= num_items:
        raise ValueError(f"k must be at least 1 and at most the {num_items} items, not {k}")
    users = users_BD.split(chunk)
    best = [(each.new_empty(len(each), 0), torch.empty(len(each), 0, dtype=torch.int64)) for each in users]
    with torch.no_grad():
        for ids_C in torch.arange(num_items).split(chunk):
            items_CD = item_vectors(ids_C)
            for index, each_BD in enumerate(users):
                scores, ids = best[index]
                new = (each_BD @ items_CD.mT).topk(min(k, len(ids_C)), dim=1)
                scores = torch.cat([scores, new.values], dim=1)
                ids = torch.cat([ids, ids_C[new.indices.cpu()]], dim=1)
                top = scores.topk(min(k, scores.shape[1]), dim=1)
                best[index] = top.values, ids.gather(1, top.indices.cpu())
    return torch.cat([ids for _, ids in best])


def recall_and_ndcg(top_BK: Tensor, ids_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return recall@k and NDCG@k of each sample, (B,) each, for one relevant item per sample.

    Args:
        top_BK: item ids, the best first, from :func:`top_items`.
        ids_B: the relevant item of each sample.
    """
    is_hit_BK = top_BK.to(ids_B.device) == ids_B.unsqueeze(1)
    gains_K = 1 / torch.arange(2.0, 2 + top_BK.shape[1], device=ids_B.device).log2()
    return is_hit_BK.any(dim=1).float(), (is_hit_BK * gains_K).sum(dim=1)

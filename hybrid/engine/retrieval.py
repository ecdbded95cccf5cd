"""Retrieval in configured runs: a loss over the items of the global batch, and ranks among all items.

The output of the net for a sample is a user vector, followed by the vector of the sample's item. Items are
the rows of the item column's table, without row 0, which stands for missing and unknown items.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.batch import Batch, SparseFeatures
from hybrid.config import RunConfig, TaskSection
from hybrid.engine.losses import weighted_summand
from hybrid.errors import ConfigError
from hybrid.input_spec import InputSpec
from hybrid.models.two_towers import in_batch_softmax, log_frequency
from hybrid.primitives.row_collectives import gather_with_gradients

_CHUNK_ITEMS = 4096
_SCORES_AT_ONCE = 1 << 24


class RetrievalLoss:
    """The loss of a step: the weighted mean of :func:`in_batch_softmax` over the samples of all trainers.

    Args:
        feature: index of the item column.
        counts_I: how often each item was chosen in the training data, by row of the item table.
        group: all trainers, which must compute the loss together.
    """

    def __init__(self, task: TaskSection, feature: int, counts_I: Tensor, group: dist.ProcessGroup) -> None:
        self._feature = feature
        self._log_q_I = log_frequency(counts_I)
        gather = partial(gather_with_gradients, group=group)
        self._softmax = partial(in_batch_softmax, temperature=task.loss_call["temperature"], gather=gather)
        self._weight = task.weight

    def __call__(self, outputs_BO: Tensor, batch: Batch) -> Tensor:
        """Return the contribution of local samples to the loss of the global batch.

        Samples of weight 0, such as items that a user did not choose, are neither positives nor negatives.
        """
        assert batch.weights is not None, "the label is a weight"
        assert batch.total_weights is not None, "batches with weights have their totals"
        chosen = batch.weights.nonzero().squeeze(1)
        weights_B = batch.weights[chosen].to(outputs_BO)
        users_BD, items_BD = outputs_BO[chosen.to(outputs_BO.device)].chunk(2, dim=1)
        log_q_B = self._log_q_I[batch.sparse_features.ids(self._feature)[chosen]]
        values_B = self._softmax(users_BD, items_BD, log_q_B)
        return weighted_summand(values_B, weights_B, batch.total_weights.item()) * self._weight


class ItemRanking:
    """Computes the rank of each sample's item among all items, by the scores of the net.

    Raises:
        ConfigError: the item column has keys of a growing table, several ids per sample, or no values.
    """

    def __init__(self, config: RunConfig, input_spec: InputSpec) -> None:
        task = config.retrieval
        assert task is not None, "the run has a retrieval task"
        names = [feature.name for feature in input_spec.sparse_features]
        self.feature = names.index(task.item)
        self._spec = input_spec
        item = input_spec.sparse_features[self.feature]
        self.num_items = item.num_rows - 1
        if item.is_growing or item.multi_hot or not self.num_items:
            rule = "item needs one id per row and a vocabulary that keeps values (min_count) and never grows"
            raise ConfigError(f"tasks.{next(iter(config.tasks))}.type", rule, task.item)

    def item_vectors(self, outputs_of: Callable[[Batch], Tensor]) -> Tensor:
        """Return ``items_ID``, on the CPU: the vector of each item, from row 1 of the item table on.

        Args:
            outputs_of: returns the outputs of the net for a batch.
        """
        chunks = [outputs_of(batch).chunk(2, dim=1)[1].cpu() for batch in self._item_batches()]
        return torch.cat(chunks)

    def _item_batches(self) -> Iterator[Batch]:
        """Yield batches with one sample per item. All columns except the item column are 0 or empty."""
        num_dense, features = len(self._spec.dense_features), self._spec.sparse_features
        for ids_C in torch.arange(1, 1 + self.num_items).split(_CHUNK_ITEMS):
            zeros_C = torch.zeros_like(ids_C)
            ids = [
                ids_C if k == self.feature else zeros_C[: 0 if f.multi_hot else None]
                for k, f in enumerate(features)
            ]
            lengths = [zeros_C if f.multi_hot else zeros_C + 1 for f in features]
            offsets = torch.cat([zeros_C[:1], torch.cat(lengths).cumsum(0)])
            sparse = SparseFeatures(torch.cat(ids), offsets, None, len(features))
            yield Batch(torch.zeros(len(ids_C), num_dense), sparse, torch.zeros(len(ids_C)), len(ids_C))

    def ranks_by(self, outputs_of: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        """Compute the vectors of all items once; return a function that computes :meth:`ranks` of a batch."""
        items_ID = self.item_vectors(outputs_of)
        return lambda batch: self.ranks(outputs_of(batch), batch, items_ID)

    def ranks(self, outputs_BO: Tensor, batch: Batch, items_ID: Tensor) -> Tensor:
        """Return ``ranks_B``: for each sample, how many items have a higher score than its item.

        Other items with an equal score count one half. The rank is infinite for a missing or unknown item,
        and NaN if the score of the sample's item is NaN.
        """
        users_BD = outputs_BO.chunk(2, dim=1)[0].cpu()
        ids_B = batch.sparse_features.ids(self.feature)
        ranks = [outputs_BO.new_empty(0, device="cpu")]
        size = max(1, _SCORES_AT_ONCE // len(items_ID))
        for each_BD, ids in zip(users_BD.split(size), ids_B.split(size), strict=True):
            scores_BI = each_BD @ items_ID.mT
            own_B1 = scores_BI.gather(1, (ids - 1).clamp(min=0).unsqueeze(1))
            higher_B, equal_B = (scores_BI > own_B1).sum(1), (scores_BI == own_B1).sum(1)
            ranks_B = torch.where(own_B1.isnan().squeeze(1), torch.nan, higher_B + (equal_B - 1) / 2)
            ranks.append(ranks_B.where(ids > 0, torch.inf).to(outputs_BO.dtype))
        return torch.cat(ranks)

"""The three stages of a dense net, built-in or custom.

::

    dense_BF ── bottom ── bottom_BH ─┐
                                     interaction ── hidden_BH ── head ── outputs_BO
    pooled_BE (embeddings) ──────────┘

The stages are separate for two reasons. Embeddings are requested before ``bottom`` and awaited after it. A
remote dense net may run between ``interaction`` and ``head``. Every stage accepts an empty batch. A sample
has one output for a binary task or a regression, C outputs for a task with C classes, and two vectors for
retrieval. If a sample has one output in total, the shape may also be ``outputs_B``.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class DenseNet(nn.Module):
    """A net of three stages: ``outputs_BO = head(interaction(bottom(dense_BF), pooled_BE))``.

    ``pooled_BE`` concatenates the pooled embeddings of the columns of ``data.sparse``, in this order. If a
    column has ``pooling = none``, the vectors of the sequence and its length replace the pooled embedding.
    Built-in nets get O as the argument ``num_outputs``.
    """

    def __init__(self, bottom: nn.Module, interaction: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.bottom = bottom
        self.interaction = interaction
        self.head = head

    def forward(self, dense_BF: Tensor, pooled_BE: Tensor) -> Tensor:
        outputs_BO: Tensor = self.head(self.interaction(self.bottom(dense_BF), pooled_BE))
        return outputs_BO


class Concatenation(nn.Module):
    """An interaction that only concatenates its inputs."""

    def forward(self, bottom_BH: Tensor, pooled_BE: Tensor) -> Tensor:
        return torch.cat([bottom_BH, pooled_BE], dim=1)


class HistoryInteraction(nn.Module):
    """Concatenates the output of ``bottom``, a vector of the user's history, and vectors from ``pooled_BE``.

    ``hidden_BH = [bottom_BH, user(candidate_BD, history_BTD, is_item_BT), *columns(pooled_BE)]``

    Args:
        user: maps a candidate and a history to ``user_BD``, such as ``InterestAttention``.
        candidate: selects ``candidate_BD`` from ``pooled_BE``.
        history: selects ``history_BTD``, and ``is_item_BT``, which is False for padding.
        columns: modules, each of which selects a vector from ``pooled_BE``, such as the candidate.
    """

    def __init__(
        self, user: nn.Module, candidate: nn.Module, history: nn.Module, columns: Iterable[nn.Module]
    ) -> None:
        super().__init__()
        self.user, self.candidate, self.history = user, candidate, history
        self.columns = nn.ModuleList(columns)

    def forward(self, bottom_BH: Tensor, pooled_BE: Tensor) -> Tensor:
        history_BTD, is_item_BT = self.history(pooled_BE)
        user_BD = self.user(self.candidate(pooled_BE), history_BTD, is_item_BT)
        return torch.cat([bottom_BH, user_BD, *(column(pooled_BE) for column in self.columns)], dim=1)

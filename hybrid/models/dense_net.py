"""A net in three stages: the form of whatever ``dense.net`` names, built in or the user's own.

::

    dense_BF ── bottom ── bottom_BH ─┐
                                     interaction ── hidden_BH ── head ── outputs_BO
    pooled_BE (embeddings) ──────────┘

The stages are apart since embeddings are asked for before ``bottom`` and awaited after it, and a
remote dense net may sit between ``interaction`` and ``head``. Every stage takes an empty batch. A sample has
one output for each task, or for each of its classes; where that is one in all, they are ``outputs_B``.
"""

import torch
from torch import Tensor, nn


class DenseNet(nn.Module):
    """``head(interaction(bottom(dense_BF), pooled_BE))`` gives ``outputs_BO``.

    ``pooled_BE`` holds the pooled embeddings of all sparse features, side by side in their order.

    The models of this form take ``num_outputs``, O, and ``remote_width``: of what a remote net gives the
    head, which is then one layer over that; 0 where there is no remote net.
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
    """An interaction that leaves everything to the head: both inputs side by side."""

    def forward(self, bottom_BH: Tensor, pooled_BE: Tensor) -> Tensor:
        return torch.cat([bottom_BH, pooled_BE], dim=1)

"""The three stages of a dense net, built-in or custom.

::

    dense_BF ── bottom ── bottom_BH ─┐
                                     interaction ── hidden_BH ── head ── outputs_BO
    pooled_BE (embeddings) ──────────┘

The stages are separate for two reasons. Embeddings are requested before ``bottom`` and awaited after it. A
remote dense net may sit between ``interaction`` and ``head``. Every stage takes an empty batch. A sample has
one output per task, or one per class of a task. If that is one in all, the outputs are ``outputs_B``.
"""

import torch
from torch import Tensor, nn


class DenseNet(nn.Module):
    """Computes ``outputs_BO = head(interaction(bottom(dense_BF), pooled_BE))``.

    ``pooled_BE`` holds the pooled embeddings of all sparse features, concatenated in their order.

    Models of this form take ``num_outputs`` (O) and ``remote_width``. The latter is the output width of a
    remote net, after which the head is a single layer; 0 means that there is no remote net.
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

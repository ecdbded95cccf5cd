"""The three stages of a dense net, built-in or custom.

::

    dense_BF ── bottom ── bottom_BH ─┐
                                     interaction ── hidden_BH ── head ── outputs_BO
    pooled_BE (embeddings) ──────────┘

The stages are separate for two reasons. Embeddings are requested before ``bottom`` and awaited after it. A
remote dense net may run between ``interaction`` and ``head``. Every stage accepts an empty batch. A sample
has one output per binary or regression task, and one per class of other tasks. A single output in total has
the shape ``outputs_B``.
"""

import torch
from torch import Tensor, nn


class DenseNet(nn.Module):
    """A net of three stages: ``outputs_BO = head(interaction(bottom(dense_BF), pooled_BE))``.

    ``pooled_BE`` holds the pooled embeddings of all sparse features, concatenated in their order. Subclasses
    have an argument ``num_outputs`` (O).
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

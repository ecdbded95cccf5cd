"""FinalMLP on a click log.

Run it by ``python examples/final_mlp.py``, or on a cluster by
``hybrid run examples/final_mlp.py --trainers 2 --workers 2``.
``--config FILE`` trains on the click log of a configuration instead of the built-in one.
"""

import click_log
import torch
from torch import Tensor, nn

from hybrid.models.final_mlp import FinalMLP


class InContext(nn.Module):
    """One stream is gated by the numeric columns, the other by the embedding vectors."""

    def __init__(self, num_dense: int, num_vectors: int) -> None:
        super().__init__()
        contexts = num_dense, num_vectors * click_log.DIM
        self.net = FinalMLP(sum(contexts), contexts)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        logits: Tensor = self.net(torch.cat([dense, vectors], dim=1), dense, vectors)
        return logits


if __name__ == "__main__":
    click_log.main(InContext)

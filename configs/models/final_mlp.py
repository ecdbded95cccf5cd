"""FinalMLP on a click log: python configs/models/final_mlp.py"""

import click_log
import torch
from torch import Tensor, nn

from hybrid.models.final_mlp import FinalMLP


class InContext(nn.Module):
    """One stream weighs the inputs by the numeric columns, the other by the vectors of the rest."""

    def __init__(self, num_dense: int, num_vectors: int) -> None:
        super().__init__()
        contexts = num_dense, num_vectors * click_log.DIM
        self.net = FinalMLP(sum(contexts), contexts)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        return self.net(torch.cat([dense, vectors], dim=1), dense, vectors)


if __name__ == "__main__":
    click_log.main(InContext)

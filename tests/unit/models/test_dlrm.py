"""DLRM against its equation, a sample and a pair at a time."""

import torch
from support.models import Parameters, check_model, plain_logit, plain_mlp, vectors
from torch import Tensor

from hybrid.models.dlrm import DLRM

NUM_SPARSE, DIM = 3, 4


def plain(parameters: Parameters, dense: Tensor, pooled: Tensor) -> Tensor:
    logits = []
    for x, row in zip(dense, pooled, strict=True):
        z = [plain_mlp(parameters, "bottom", x), *row.split(DIM)]
        dots = [(z[i] * z[j]).sum() for i in range(len(z)) for j in range(i)]
        logits.append(plain_logit(parameters, "head", torch.cat([z[0], torch.stack(dots)])))
    return torch.stack(logits)


def test_it_is_the_equation() -> None:
    model = DLRM(2, NUM_SPARSE, DIM, bottom=(5,), top=(6, 3))
    check_model(model, plain, vectors(5, 2, seed=1), vectors(5, NUM_SPARSE * DIM, seed=2))

"""DCN-v2 against its equation, a sample and a layer at a time."""

import torch
from support.models import Parameters, check_model, plain_logit, vectors
from torch import Tensor

from hybrid.models.dcn_v2 import DCNv2

NUM_LAYERS = 3


def plain(parameters: Parameters, dense: Tensor, pooled: Tensor) -> Tensor:
    logits = []
    for b in range(len(dense)):
        x0 = x = torch.cat([dense[b], pooled[b]])
        for number in range(NUM_LAYERS):
            weight, bias = (parameters[f"interaction.layers.{number}.{kind}"] for kind in ("weight", "bias"))
            x = x0 * ((weight * x).sum(dim=1) + bias) + x
        logits.append(plain_logit(parameters, "head", x))
    return torch.stack(logits)


def test_it_is_the_equation() -> None:
    check_model(DCNv2(2 + 4, NUM_LAYERS, deep=(5, 3)), plain, vectors(5, 2, seed=1), vectors(5, 4, seed=2))

"""DCN-v2 against its equation, a sample and a layer at a time."""

import pytest
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


@pytest.mark.parametrize(("num_dense", "num_outputs"), [(2, 1), (0, 1), (2, 3)])
def test_model_equals_its_equation(num_dense: int, num_outputs: int) -> None:
    model = DCNv2(num_dense + 4, NUM_LAYERS, deep=(5, 3), num_outputs=num_outputs)
    inputs = vectors(5, num_dense, seed=1), vectors(5, 4, seed=2)
    check_model(model, plain, *inputs)
    assert model(*inputs).numel() == 5 * num_outputs

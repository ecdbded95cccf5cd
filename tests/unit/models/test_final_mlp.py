"""FinalMLP against its equations, a sample and a head at a time."""

import pytest
import torch
from torch import Tensor
from unit.models.equations import Parameters, check_model, plain_mlp, vectors

from hybrid.models.final_mlp import BilinearFusion, FinalMLP

NUM_HEADS = 2


def stream(parameters: Parameters, k: int, x: Tensor, context: Tensor) -> Tensor:
    raised = plain_mlp(parameters, f"gates.{k}.layers", context, ends_linear=True)
    return plain_mlp(parameters, f"streams.{k}", x * 2 / (1 + torch.exp(-raised)))


def plain(parameters: Parameters, inputs: Tensor, first: Tensor, second: Tensor) -> Tensor:
    logits = []
    for b, x in enumerate(inputs):
        o, p = (stream(parameters, k, x, context[b]) for k, context in enumerate((first, second)))
        logit = (parameters["fusion.first.weight"][0] * o).sum() + parameters["fusion.first.bias"][0]
        logit = logit + (parameters["fusion.second.weight"][0] * p).sum()
        for head, (o_h, p_h) in enumerate(zip(o.chunk(NUM_HEADS), p.chunk(NUM_HEADS), strict=True)):
            products = parameters["fusion.products_NHG"][head]
            for i in range(len(o_h)):
                for j in range(len(p_h)):
                    logit = logit + products[i, j] * o_h[i] * p_h[j]
        logits.append(logit)
    return torch.stack(logits)


def test_model_equals_its_equations() -> None:
    model = FinalMLP(5, contexts=(3, 2), first=(7, 6), second=(4,), gate=3, num_heads=NUM_HEADS)
    check_model(model, plain, vectors(6, 5, seed=1), vectors(6, 3, seed=2), vectors(6, 2, seed=3))


def test_heads_divide_the_streams() -> None:
    with pytest.raises(ValueError, match="3 heads do not divide streams of widths 6 and 4"):
        BilinearFusion(6, 4, 3)

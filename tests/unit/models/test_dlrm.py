"""DLRM against its equation, a sample and a pair at a time."""

import pytest
import torch
from support.models import Parameters, check_model, plain_logit, plain_mlp, vectors
from torch import Tensor

from hybrid.models.dlrm import DLRM, DotInteraction

NUM_SPARSE, DIM = 3, 4


def plain(parameters: Parameters, dense: Tensor, pooled: Tensor) -> Tensor:
    logits = []
    for x, row in zip(dense, pooled, strict=True):
        first = plain_mlp(parameters, "bottom", x) if len(x) else x
        z = [*([first] if len(x) else []), *row.split(DIM)]
        dots = [(z[i] * z[j]).sum() for i in range(len(z)) for j in range(i)]
        logits.append(plain_logit(parameters, "head", torch.cat([first, torch.stack(dots)])))
    return torch.stack(logits)


@pytest.mark.parametrize(("num_dense", "num_outputs"), [(2, 1), (0, 1), (2, 3)])
def test_model_equals_its_equation(num_dense: int, num_outputs: int) -> None:
    model = DLRM(num_dense, NUM_SPARSE, DIM, bottom=(5,), top=(6, 3), num_outputs=num_outputs)
    inputs = vectors(5, num_dense, seed=1), vectors(5, NUM_SPARSE * DIM, seed=2)
    check_model(model, plain, *inputs)
    assert model(*inputs).numel() == 5 * num_outputs


def test_dot_interaction_has_first_and_second_derivatives() -> None:
    inputs = vectors(2, DIM, seed=1), vectors(2, NUM_SPARSE * DIM, seed=2)
    interaction = DotInteraction(NUM_SPARSE + 1, DIM)
    assert torch.autograd.gradcheck(interaction, inputs)
    assert torch.autograd.gradgradcheck(interaction, inputs)


def test_dot_interaction_works_under_autocast() -> None:
    model = DLRM(2, NUM_SPARSE, DIM, bottom=(8,), top=(16, 12))
    dense, pooled = vectors(3, 2, seed=3).float(), vectors(3, NUM_SPARSE * DIM, seed=4).float().detach()
    pooled.requires_grad_()
    (expected,) = torch.autograd.grad(model(dense, pooled).sum(), pooled)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(dense, pooled)
    (found,) = torch.autograd.grad(logits.sum(), pooled)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.02)

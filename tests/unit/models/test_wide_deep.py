"""Wide & Deep against its equation, a sample at a time."""

import pytest
import torch
from support.models import Parameters, check_model, plain_logit, vectors
from torch import Tensor

from hybrid.models.wide_deep import WideAndDeep

DIMS = (3, 1, 4)


def plain(parameters: Parameters, dense: Tensor, pooled: Tensor) -> Tensor:
    logits = []
    for x, row in zip(dense, pooled, strict=True):
        features = row.split([dim + 1 for dim in DIMS])
        wide = torch.stack([feature[-1] for feature in features]).sum()
        if len(x):
            wide = wide + (parameters["interaction.linear.dense_weights.weight"][0] * x).sum()
        deep = torch.cat([x, *(feature[:-1] for feature in features)])
        logits.append(wide + plain_logit(parameters, "head.deep", deep))
    return torch.stack(logits)


@pytest.mark.parametrize(("num_dense", "num_outputs"), [(2, 1), (0, 1), (2, 3)])
def test_model_equals_its_equation(num_dense: int, num_outputs: int) -> None:
    model = WideAndDeep(num_dense, DIMS, deep=(6, 3), num_outputs=num_outputs)
    inputs = vectors(5, num_dense, seed=1), vectors(5, sum(DIMS) + len(DIMS), seed=2)
    check_model(model, plain, *inputs)
    assert model(*inputs).numel() == 5 * num_outputs

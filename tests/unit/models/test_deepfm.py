"""DeepFM against its equation, a sample and a pair at a time."""

from itertools import combinations

import pytest
import torch
from support.models import Parameters, check_model, plain_logit, vectors
from torch import Tensor

from hybrid.models.deepfm import DeepFM

NUM_SPARSE, DIM = 3, 4


def plain(parameters: Parameters, dense: Tensor, pooled: Tensor) -> Tensor:
    logits = []
    for x, row in zip(dense, pooled, strict=True):
        features = [(each[:-1], each[-1]) for each in row.split(DIM + 1)]
        logit = torch.stack([weight for _, weight in features]).sum()
        if len(x):
            logit = logit + (parameters["interaction.linear.dense_weights.weight"][0] * x).sum()
        for (v, _), (w, _) in combinations(features, 2):
            logit = logit + torch.dot(v, w)
        deep = torch.cat([x, *(factors for factors, _ in features)])
        logits.append(logit + plain_logit(parameters, "head.deep", deep))
    return torch.stack(logits)


@pytest.mark.parametrize(("num_dense", "num_outputs"), [(2, 1), (0, 1), (2, 3)])
def test_model_equals_its_equation(num_dense: int, num_outputs: int) -> None:
    model = DeepFM(num_dense, NUM_SPARSE, DIM, deep=(6, 3), num_outputs=num_outputs)
    inputs = vectors(5, num_dense, seed=1), vectors(5, NUM_SPARSE * (DIM + 1), seed=2)
    check_model(model, plain, *inputs)
    assert model(*inputs).numel() == 5 * num_outputs

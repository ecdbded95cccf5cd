"""DeepFM against its equation, a sample and a pair at a time."""

from itertools import combinations

import torch
from support.models import Parameters, check_model, plain_logit, vectors
from torch import Tensor

from hybrid.models.deepfm import DeepFM

NUM_SPARSE, DIM = 3, 4


def plain(parameters: Parameters, dense: Tensor, pooled: Tensor) -> Tensor:
    logits = []
    for x, row in zip(dense, pooled, strict=True):
        features = [(each[:-1], each[-1]) for each in row.split(DIM + 1)]
        logit = (parameters["interaction.linear.dense_weights.weight"][0] * x).sum()
        for _, weight in features:
            logit = logit + weight
        for (v, _), (w, _) in combinations(features, 2):
            logit = logit + torch.dot(v, w)
        deep = torch.cat([x, *(factors for factors, _ in features)])
        logits.append(logit + plain_logit(parameters, "head.deep", deep))
    return torch.stack(logits)


def test_it_is_the_equation() -> None:
    model = DeepFM(2, NUM_SPARSE, DIM, deep=(6, 3))
    check_model(model, plain, vectors(5, 2, seed=1), vectors(5, NUM_SPARSE * (DIM + 1), seed=2))

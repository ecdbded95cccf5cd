"""Wide & Deep against its equation, a sample at a time."""

import torch
from support.models import Parameters, check_model, plain_logit, vectors
from torch import Tensor

from hybrid.models.wide_deep import WideAndDeep

DIMS = (3, 1, 4)


def plain(parameters: Parameters, dense: Tensor, pooled: Tensor) -> Tensor:
    logits = []
    for x, row in zip(dense, pooled, strict=True):
        features = row.split([dim + 1 for dim in DIMS])
        wide = (parameters["interaction.linear.dense_weights.weight"][0] * x).sum()
        for feature in features:
            wide = wide + feature[-1]
        deep = torch.cat([x, *(feature[:-1] for feature in features)])
        logits.append(wide + plain_logit(parameters, "head.deep", deep))
    return torch.stack(logits)


def test_it_is_the_equation() -> None:
    model = WideAndDeep(2, DIMS, deep=(6, 3))
    check_model(model, plain, vectors(5, 2, seed=1), vectors(5, sum(DIMS) + len(DIMS), seed=2))

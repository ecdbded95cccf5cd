"""A module over tensors that are not its own."""

from collections.abc import Callable

import pytest
import torch
from support.replicas import Weighted
from support.seeded import random, seeded
from torch import nn
from torch.testing import assert_close

from hybrid.dense.data_parallel.replicas import shadow


def test_other_tensors_are_shared() -> None:
    module = nn.BatchNorm1d(3)
    weight = torch.full((3,), 2.0)
    other = shadow(module, {module.weight: weight})
    assert other.weight is weight
    assert other.bias is module.bias
    assert other.running_mean is module.running_mean
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    assert [name for name, _ in other.named_parameters()] == ["bias"]


@pytest.mark.parametrize("kind", ["parametrized", "traced by torch.fx", "recurrent"])
def test_modules_with_derived_weights_use_the_substitutes(kind: str) -> None:
    make: dict[str, Callable[[], nn.Module]] = {
        "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        "traced by torch.fx": lambda: torch.fx.symbolic_trace(Weighted(torch.ones(3))),
        "recurrent": lambda: nn.LSTM(3, 3),
    }
    module, like = seeded(make[kind]), seeded(make[kind], seed=1)
    like_tensors = [*like.parameters(), *like.buffers()]
    tensors = dict(zip([*module.parameters(), *module.buffers()], like_tensors, strict=True))
    x = random(2, 3)
    plain = {key: value.detach() * 2 for key, value in tensors.items()}
    with torch.no_grad():
        for tensor in like_tensors:
            tensor.mul_(2)
        assert_close(shadow(module, plain)(x), like(x))

"""Which matrix products oneDNN computes."""

import pytest
from torch import Tensor

from hybrid.dense import matmul


def noted_products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Samples, inputs and outputs of each product that oneDNN computes in this process from now on."""
    computed: list[tuple[int, ...]] = []
    onednn = matmul.multiply_by_onednn

    def noted(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        computed.append((*input.shape, weight.size(0)))
        return onednn(input, weight, bias)

    monkeypatch.setattr(matmul, "multiply_by_onednn", noted)
    return computed

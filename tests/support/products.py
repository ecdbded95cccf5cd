"""Record of the matrix products that oneDNN computes."""

import pytest
from torch import Tensor

from hybrid.dense import matmul


def noted_products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list that receives samples, inputs and outputs of each product of oneDNN in this process."""
    computed: list[tuple[int, ...]] = []
    onednn = matmul.multiply_by_onednn

    def noted(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        computed.append((*input.shape, weight.size(0)))
        return onednn(input, weight, bias)

    monkeypatch.setattr(matmul, "multiply_by_onednn", noted)
    return computed

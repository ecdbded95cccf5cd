"""A custom net that fails in the backward pass."""

from typing import Any

import torch
from torch import Tensor, nn

from hybrid.dense.net_builder import build_dense_net


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise KeyError("gradient")


class _FailingLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Failing.apply(x)  # type: ignore[no-untyped-call]
        return output


def backward(config: Any, input_spec: Any, widths: Any) -> nn.Module:
    """Return a net whose last layer raises an exception in its backward pass; a value of ``dense.net``."""
    net = build_dense_net(config.replace(dense=type(config.dense)()), input_spec, widths)
    net.head = nn.Sequential(net.head, _FailingLayer())
    return net

"""Custom nets: one with dropout and running statistics, and one that fails in the backward pass."""

from typing import Any

import torch
from torch import Tensor, nn

from hybrid.config import RunConfig
from hybrid.dense.net_builder import build_dense_net
from hybrid.input_spec import InputSpec
from hybrid.models.dense_net import Concatenation, DenseNet


def build(config: RunConfig, input_spec: InputSpec, widths: list[int]) -> DenseNet:
    """Build the net; a value of ``dense.net``."""
    width = len(input_spec.dense_features) + sum(widths)
    layers = nn.Dropout(0.5), nn.Linear(width, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)
    return DenseNet(nn.Identity(), Concatenation(), nn.Sequential(*layers, nn.Flatten(0)))


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

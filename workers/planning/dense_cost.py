"""What a dense net costs a sample: its arithmetic, counted by torch, and its parameters."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from hybrid.config import RunConfig
from hybrid.dense.net_builder import build_dense_net
from hybrid.input_spec import InputSpec


@dataclass(frozen=True)
class DenseWork:
    """A dense net's forward and backward pass.

    Attributes:
        flops: of the products for one sample; an addition and a multiplication are two.
        parameters: values that trainers add up and step each step.
    """

    flops: float
    parameters: int


def dense_work(config: RunConfig, input_spec: InputSpec, widths: Sequence[int]) -> DenseWork:
    """Count those of ``dense.net``; its parameters lie in memory meanwhile.

    Args:
        widths: of what the net gets of each sparse feature.

    Raises:
        ConfigError: as when the net is built to be trained.
    """
    plain = config.replace(dense=dataclasses.replace(config.dense, matmul="torch"))
    net = build_dense_net(plain, input_spec, widths)
    dtype = next((parameter.dtype for parameter in net.parameters()), torch.float32)
    dense_BF = torch.zeros(1, len(input_spec.dense_features), dtype=dtype)
    pooled_BE = torch.zeros(1, sum(widths), dtype=dtype, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        net(dense_BF, pooled_BE).sum().backward()
    return DenseWork(counter.get_total_flops(), sum(p.numel() for p in net.parameters()))

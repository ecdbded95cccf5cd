"""A custom net with dropout and running statistics."""

from torch import nn

from hybrid.config import RunConfig
from hybrid.input_spec import InputSpec
from hybrid.models.dense_net import Concatenation, DenseNet


def build(config: RunConfig, input_spec: InputSpec, widths: list[int]) -> DenseNet:
    """Build the net; a value of ``dense.net``."""
    width = len(input_spec.dense_features) + sum(widths)
    head = (
        nn.Dropout(0.5),
        nn.Linear(width, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 1),
        nn.Flatten(0),
    )
    return DenseNet(nn.Identity(), Concatenation(), nn.Sequential(*head))

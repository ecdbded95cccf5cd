"""What the examples share: arguments, a loop, and scores of a test set that all trainers compute together."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.custom_loop.cluster import Cluster
from hybrid.metrics import binary_metrics


def arguments(parser: ArgumentParser | None = None, samples: int = 200_000, epochs: int = 3) -> Namespace:
    """``--samples``, ``--test-samples`` and ``--epochs``, and what ``parser`` takes beside them."""
    parser = parser or ArgumentParser()
    parser.add_argument("--samples", type=int, default=samples, help=f"to train on ({samples:,})")
    parser.add_argument("--test-samples", type=int, default=20_000, help="to score by (20,000)")
    parser.add_argument("--epochs", type=int, default=epochs, help=f"passes over them ({epochs})")
    return parser.parse_args()


def train(
    cluster: Cluster,
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]],
    data: Any,
    epochs: int,
    size: int | None = 512,
    lr: float = 2e-3,
) -> None:
    """Train by Adam.

    Args:
        loss: of the model's outputs and a batch: a value a sample, perhaps with weights.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(epochs):
        for batch in cluster.batches(data, size):
            optimizer.zero_grad()
            values = loss(model(batch), batch)
            cluster.backward(*(values if isinstance(values, tuple) else (values,)))
            optimizer.step()


def scores(
    cluster: Cluster, score: Callable[[Any], tuple[Tensor, ...]], data: Any, size: int = 4096
) -> list[Tensor]:
    """What ``score`` makes of the batches of a test set, of all of it."""
    with torch.no_grad():
        parts = [tuple(map(cluster.gather, score(batch))) for batch in cluster.batches(data, size)]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def auc(logits: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve."""
    return binary_metrics(logits.flatten(), labels.flatten()).auc

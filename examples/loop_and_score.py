"""The arguments, the training loop and the evaluation that the examples share."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hybrid import Cluster, Negatives
from hybrid.metrics import binary_metrics


def arguments(parser: ArgumentParser | None = None, samples: int = 200_000, epochs: int = 3) -> Namespace:
    """Parse ``--samples``, ``--test-samples``, ``--epochs`` and the options of ``parser``."""
    parser = parser or ArgumentParser()
    parser.add_argument(
        "--samples", type=int, default=samples, help=f"training samples (default: {samples:,})"
    )
    parser.add_argument("--test-samples", type=int, default=20_000, help="test samples (default: 20,000)")
    parser.add_argument(
        "--epochs", type=int, default=epochs, help=f"passes over the training samples (default: {epochs})"
    )
    return parser.parse_args()


def train(
    cluster: Cluster,
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]],
    data: Any,
    epochs: int,
    size: int | None = 512,
    lr: float = 2e-3,
    negatives: Mapping[str, Negatives] | None = None,
) -> None:
    """Train with Adam.

    Args:
        loss: maps the model's outputs and a batch to one loss value per sample, or to values and weights.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(epochs):
        for batch in cluster.batches(data, size, negatives=negatives):
            optimizer.zero_grad()
            values = loss(model(batch), batch)
            cluster.backward(*(values if isinstance(values, tuple) else (values,)))
            optimizer.step()


def scores(
    cluster: Cluster, score: Callable[[Any], tuple[Tensor, ...]], data: Any, size: int = 4096
) -> list[Tensor]:
    """Return the outputs of ``score`` for the whole test set, gathered from all trainers."""
    with torch.no_grad():
        outputs = [tuple(map(cluster.gather, score(batch))) for batch in cluster.batches(data, size)]
    return [torch.cat(chunks) for chunks in zip(*outputs, strict=True)]


def auc(logits: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve."""
    return binary_metrics(logits.flatten(), labels.flatten()).auc

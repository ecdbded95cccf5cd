"""The constants and training examples of torch's ``ddp_under_dist_autograd_test.py``."""

import itertools

import torch
from torch import nn

from hybrid.batch import Batch, SparseFeatures

NUM_ROWS, DIM, NUM_DENSE, HIDDEN, OUT = 2, 3, 2, 3, 1
NUM_EXAMPLES = 16
ROW_VALUE = 0.5


def get_linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a layer without bias whose first weight is -1 and whose other weights are 1."""
    layer = nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)[0, 0] = -1.0
    return layer


def get_training_examples(num_trainers: int) -> list[Batch]:
    """Return one batch for each trainer; ``labels`` are the factors of outputs, -1 or 1.

    Every example has a twin of the same features and the opposite value, at another trainer: over all
    trainers, their gradients cancel.
    """
    examples = [
        (value, (x, y), row)
        for value in (-1.0, 1.0)
        for x, y, row in itertools.product((-value, value), (value, -value), range(NUM_ROWS))
    ]
    size = NUM_EXAMPLES // num_trainers
    return [batch_of(examples[start : start + size]) for start in range(0, NUM_EXAMPLES, size)]


def batch_of(examples: list[tuple[float, tuple[float, float], int]]) -> Batch:
    """Return a batch of examples, each with value, dense features and row."""
    values, dense, rows = zip(*examples, strict=True)
    sparse = SparseFeatures(torch.tensor(rows), None, None, num_features=1)
    return Batch(torch.tensor(dense), sparse, torch.tensor(values), NUM_EXAMPLES)

"""Samples whose vectors are known, for tests without workers."""

from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from hybrid.batch import Batch
from hybrid.engine.hybrid_model import MicroBatch
from hybrid.updates.ticket import Ticket


def micro_batch(
    dense_BF: Tensor, pooled_BE: Tensor, step: int = 0, index: int = 0, *, is_last: bool = True
) -> MicroBatch[Batch]:
    """Return samples whose lookup has the response ``pooled_BE``."""
    batch = Batch.empty(0, 0)._replace(dense_features=dense_BF, labels=torch.zeros(len(dense_BF)))
    vectors: Any = Future()
    vectors.set_result(pooled_BE)
    return MicroBatch(batch, Ticket(0, step, step, index), vectors, is_last)

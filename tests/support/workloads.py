"""The workload on which forms of the dense net are timed: the shape of DLRM on Criteo's Kaggle data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import cycle, islice

import torch
from support.cluster import small_config

from hybrid.batch import Batch, SparseFeatures
from hybrid.config import RunConfig
from hybrid.embedding.spec import FeatureSpec, InputSpec

# fmt: off
ROWS = (
    1460, 583, 100_000, 100_000, 305, 24, 12_517, 633, 3, 93_145, 5683, 100_000, 3194, 27, 14_992,
    100_000, 10, 5652, 2173, 4, 100_000, 18, 15, 100_000, 105, 100_000,
)
# fmt: on
SPEC = InputSpec(
    tuple(f"x{i}" for i in range(13)), tuple(FeatureSpec(f"c{i}", rows) for i, rows in enumerate(ROWS))
)
_DIFFERENT_BATCHES = 20


def dlrm_config(trainers: int, **dense: object) -> RunConfig:
    """The model and its cluster, with two workers and plain SGD."""
    shape = {"bottom_mlp": (512, 256, 64), "top_mlp": (512, 256), "optimizer": "SGD", "learning_rate": 0.1}
    return small_config(
        cluster={"trainers": trainers, "workers": 2},
        embedding={"dim": 16, "optimizer": "sgd", "learning_rate": 0.1},
        dense={**shape, **dense},
    )


def batches(global_size: int, trainers: int, num_steps: int, trainer: int) -> Iterator[Batch]:
    """A trainer's share of some steps, made beforehand and gone through in turn."""
    return islice(cycle(_made(global_size // trainers, trainers, trainer)), num_steps)


@cache
def _made(size: int, trainers: int, trainer: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(100 * trainers + trainer)
    return [_batch(size, generator) for _ in range(_DIFFERENT_BATCHES)]


def _batch(size: int, generator: torch.Generator) -> Batch:
    """Ids are floor(rows * u^3) with u uniform, so that small ones are frequent."""
    uniform_KB = torch.rand(len(ROWS), size, generator=generator)
    ids_KB = (torch.tensor(ROWS).unsqueeze(1) * uniform_KB.double().pow(3)).long()
    sparse = SparseFeatures(ids_KB.flatten(), None, None, len(ROWS))
    dense_BF = torch.randn(size, 13, generator=generator)
    labels_B = (torch.rand(size, generator=generator) < 0.25).float()
    return Batch(dense_BF, sparse, labels_B, global_size=0)

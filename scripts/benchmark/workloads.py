"""What every system trains on: the same tables, nets, start weights and batches.

=== ============================= ============== ======== ======================== ===================
    shape                         rows, width    ids      dense net                samples a step
=== ============================= ============== ======== ======================== ===================
W1  DLRM on Criteo's Kaggle data  26 tables, 16  1        13-512-256-64-16, dots,  2 trainers x 2048
                                                          367-512-256-1
W2  embedding-heavy               8 x 200k, 64   20       13-64, beside the        2 trainers x 1024
                                                          vectors, 576-64-1
W3  latency-bound                 as W1          as W1    as W1                    2 trainers x 128
=== ============================= ============== ======== ======================== ===================

Dense features are N(0, 1), labels 1 with probability a quarter, ids floor(rows * u^3) with u uniform, so that
small ones are frequent. SGD with learning rate 0.1, for dense nets and tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch, SparseFeatures
from hybrid.config import ClusterSection, DenseSection, EmbeddingSection, RunConfig
from hybrid.dense.configured import build_dense_net
from hybrid.dense.nets import DenseNet
from hybrid.embedding.spec import TableSpec
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.training.tables import table_specs

LEARNING_RATE = 0.1
NUM_DENSE = 13
NUM_BATCHES = 20  # of each trainer, made beforehand and gone through in turn
# fmt: off
KAGGLE_ROWS = (
    1460, 583, 100_000, 100_000, 305, 24, 12_517, 633, 3, 93_145, 5683, 100_000, 3194, 27, 14_992,
    100_000, 10, 5652, 2173, 4, 100_000, 18, 15, 100_000, 105, 100_000,
)
# fmt: on


@dataclass(frozen=True)
class Workload:
    """One of the workloads, or a variation of it.

    Attributes:
        table_rows, dim: one table a feature.
        hotness: ids of a feature in a sample.
        trainer_batch: samples of a trainer in a step.
        dense: keys of ``[dense]``, of the net.
        optimizer: of the tables.
    """

    name: str
    table_rows: tuple[int, ...]
    dim: int
    hotness: int
    trainer_batch: int
    trainers: int = 2
    workers: int = 2
    dense: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"

    @property
    def global_batch(self) -> int:
        return self.trainers * self.trainer_batch

    @property
    def input_spec(self) -> InputSpec:
        features = (FeatureSpec(f"c{k}", rows, self.hotness > 1) for k, rows in enumerate(self.table_rows))
        return InputSpec(tuple(f"x{f}" for f in range(NUM_DENSE)), tuple(features))

    def config(self) -> RunConfig:
        """The run that trains it."""
        return RunConfig(
            cluster=ClusterSection(trainers=self.trainers, workers=self.workers),
            embedding=EmbeddingSection(dim=self.dim, optimizer=self.optimizer, learning_rate=LEARNING_RATE),
            dense=DenseSection(optimizer="SGD", learning_rate=LEARNING_RATE, device="cpu", **self.dense),
        )

    def tables(self) -> tuple[TableSpec, ...]:
        return table_specs(self.config(), self.input_spec)

    def dense_net(self) -> DenseNet:
        """The net, with the weights that every system starts from."""
        return build_dense_net(self.config(), self.input_spec, [self.dim] * len(self.table_rows))

    def batches(self, trainer: int) -> Sequence[Batch]:
        """The batches of one trainer."""
        return _batches(self.table_rows, self.hotness, self.trainer_batch, self.trainers, trainer)

    def global_batches(self) -> list[Batch]:
        """The batches of all trainers, sample after sample, for one process."""
        return [_joined(parts) for parts in zip(*map(self.batches, range(self.trainers)), strict=True)]


_KAGGLE: Mapping[str, Any] = {"bottom_mlp": (512, 256, 64), "top_mlp": (512, 256)}
WORKLOADS = {
    "W1": Workload("W1", KAGGLE_ROWS, 16, 1, 2048, dense=_KAGGLE),
    "W2": Workload("W2", (200_000,) * 8, 64, 20, 1024, dense={"net": "benchmark.workloads:concatenation"}),
    "W3": Workload("W3", KAGGLE_ROWS, 16, 1, 128, dense=_KAGGLE),
}


class Concatenation(nn.Module):
    """Everything side by side."""

    def forward(self, bottom_BH: Tensor, pooled_BE: Tensor) -> Tensor:
        return torch.cat([bottom_BH, pooled_BE], dim=1)


def concatenation(config: RunConfig, input_spec: InputSpec, widths: list[int]) -> DenseNet:
    """The dense net of W2."""
    bottom = nn.Sequential(nn.Linear(NUM_DENSE, 64), nn.ReLU())
    head = nn.Sequential(nn.Linear(64 + sum(widths), 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    return DenseNet(bottom, Concatenation(), head)


@cache
def _batches(
    table_rows: tuple[int, ...], hotness: int, size: int, trainers: int, trainer: int
) -> list[Batch]:
    generator = torch.Generator().manual_seed(100 * trainers + trainer)
    return [_batch(table_rows, hotness, size, trainers, generator) for _ in range(NUM_BATCHES)]


def _batch(
    table_rows: tuple[int, ...], hotness: int, size: int, trainers: int, generator: torch.Generator
) -> Batch:
    num_features, num_bags = len(table_rows), len(table_rows) * size
    uniform_KL = torch.rand(num_features, size * hotness, generator=generator, dtype=torch.float64)
    ids_L = (torch.tensor(table_rows).unsqueeze(1) * uniform_KL.pow(3)).long().flatten()
    offsets = None if hotness == 1 else torch.arange(num_bags + 1) * hotness
    dense_BF = torch.randn(size, NUM_DENSE, generator=generator)
    labels_B = (torch.rand(size, generator=generator) < 0.25).float()
    return Batch(dense_BF, SparseFeatures(ids_L, offsets, None, num_features), labels_B, size * trainers)


def _joined(parts: Sequence[Batch]) -> Batch:
    sparse = [p.sparse_features for p in parts]
    num_features = sparse[0].num_features
    ids_L = torch.cat([s.ids_L.view(num_features, -1) for s in sparse], dim=1).flatten()
    offsets = None
    if sparse[0].offsets is not None:
        num_bags = num_features * sum(s.batch_size for s in sparse)
        offsets = torch.arange(num_bags + 1) * (len(ids_L) // num_bags)
    labels_B = torch.cat([p.labels for p in parts])
    return Batch(
        torch.cat([p.dense_features for p in parts]),
        SparseFeatures(ids_L, offsets, None, num_features),
        labels_B,
        len(labels_B),
    )

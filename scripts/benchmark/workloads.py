"""The workloads: tables, nets, initial weights and batches, the same for all systems.

=== ============================= ============== ======== ======================== ===================
    shape                         rows, width    ids      dense net                samples per step
=== ============================= ============== ======== ======================== ===================
W1  DLRM on Criteo's Kaggle data  26 tables, 16  1        13-512-256-64-16, dots,  2 trainers x 2048
                                                          367-512-256-1
W2  embedding-heavy               8 x 200k, 64   20       13-64, beside the        2 trainers x 1024
                                                          vectors, 576-64-1
W3  latency-bound                 as W1          as W1    as W1                    2 trainers x 128
W4  many tables, one worker       40 x 80k, 24   3        as W2                    2 trainers x 256
W5  wide rows                     6 x 1M, 96     0 to 20  as W2                    3 trainers x 512
W6  one trainer, one worker       60 x 5k, 12    1        as W2                    1 trainer x 128
W7  a large dense net             26 tables, 64  1        13-512-256-64, dots,     2 trainers x 4096
                                                          415-1024-1024-512-256-1
=== ============================= ============== ======== ======================== ===================

Dense features are N(0, 1). Labels are 1 with probability 0.25. Ids are floor(rows * u^3) with u uniform in
[0, 1), so small ids are frequent. Tables have sum pooling. The optimizer is SGD with learning rate 0.1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.batch import Batch, SparseFeatures
from hybrid.config import ClusterSection, DenseSection, EmbeddingSection, RunConfig, TrainSection
from hybrid.dense.net_builder import build_dense_net
from hybrid.embedding.initial_rows import fill_random_rows
from hybrid.embedding.table_spec import TableSpec
from hybrid.engine.model_builder import table_specs
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.models.dense_net import Concatenation, DenseNet

LEARNING_RATE = 0.1
NUM_DENSE = 13
NUM_BATCHES = 20  # distinct batches of each trainer
# fmt: off
KAGGLE_ROWS = (
    1460, 583, 100_000, 100_000, 305, 24, 12_517, 633, 3, 93_145, 5683, 100_000, 3194, 27, 14_992,
    100_000, 10, 5652, 2173, 4, 100_000, 18, 15, 100_000, 105, 100_000,
)
# fmt: on


@dataclass(frozen=True)
class Workload:
    """A model, its initial weights and its batches.

    Attributes:
        table_rows, dim: number of rows of each table, one per feature, and their width.
        hotness: number of ids per sample of a feature.
        trainer_batch: samples of a trainer in a step.
        dense: keys of ``[dense]`` for the net.
        varies: whether ``hotness`` is a mean, and samples have 0 to twice as many ids.
    """

    name: str
    table_rows: tuple[int, ...]
    dim: int
    hotness: int
    trainer_batch: int
    trainers: int = 2
    workers: int = 2
    dense: Mapping[str, Any] = field(default_factory=dict)
    varies: bool = False

    @property
    def global_batch(self) -> int:
        return self.trainers * self.trainer_batch

    @property
    def is_multi_hot(self) -> bool:
        return self.varies or self.hotness > 1

    @property
    def input_spec(self) -> InputSpec:
        features = (FeatureSpec(f"c{k}", rows, self.is_multi_hot) for k, rows in enumerate(self.table_rows))
        return InputSpec(tuple(f"x{f}" for f in range(NUM_DENSE)), tuple(features))

    @property
    def config(self) -> RunConfig:
        """The configuration of the run."""
        return RunConfig(
            cluster=ClusterSection(trainers=self.trainers, workers=self.workers),
            embedding=EmbeddingSection(dim=self.dim, optimizer="sgd", learning_rate=LEARNING_RATE),
            train=TrainSection(batch_size=self.global_batch),
            dense=DenseSection(optimizer="SGD", learning_rate=LEARNING_RATE, device="cpu", **self.dense),
        )

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        return table_specs(self.config, self.input_spec)

    def initial_rows(self) -> dict[str, Tensor]:
        """Return the initial rows of this project's tables by name."""
        rows = {table.name: torch.empty(table.num_rows, table.dim) for table in self.tables}
        for table in self.tables:
            fill_random_rows(rows[table.name], table, self.config.run.seed)
        return rows

    def dense_net(self) -> nn.Module:
        """Return the net with the initial weights."""
        return build_dense_net(self.config, self.input_spec, [self.dim] * len(self.table_rows))

    def batches(self, trainer: int) -> list[Batch]:
        """Return the batches of one trainer."""
        generator = torch.Generator().manual_seed(100 * self.trainers + trainer)
        return [self._batch(generator) for _ in range(NUM_BATCHES)]

    def _batch(self, generator: torch.Generator) -> Batch:
        num_features, size = len(self.table_rows), self.trainer_batch
        lengths_KB = torch.full((num_features, size), self.hotness)
        if self.varies:
            lengths_KB = torch.randint(0, 2 * self.hotness + 1, (num_features, size), generator=generator)
        rows_L = torch.tensor(self.table_rows).repeat_interleave(lengths_KB.sum(1))
        uniform_L = torch.rand(len(rows_L), generator=generator, dtype=torch.float64)
        ids_L = (rows_L * uniform_L.pow(3)).long()
        offsets = _offsets(lengths_KB) if self.is_multi_hot else None
        dense_BF = torch.randn(size, NUM_DENSE, generator=generator)
        labels_B = (torch.rand(size, generator=generator) < 0.25).float()
        sparse = SparseFeatures(ids_L, offsets, None, num_features)
        return Batch(dense_BF, sparse, labels_B, self.global_batch)

    def global_batches(self) -> list[Batch]:
        """Return the global batches, for one process."""
        by_trainer = [self.batches(trainer) for trainer in range(self.trainers)]
        return [_concatenate(slices) for slices in zip(*by_trainer, strict=True)]


def concatenation(config: RunConfig, input_spec: InputSpec, widths: list[int]) -> DenseNet:
    """Return the dense net of W2, W4, W5 and W6."""
    bottom = nn.Sequential(nn.Linear(NUM_DENSE, 64), nn.ReLU())
    head = nn.Sequential(nn.Linear(64 + sum(widths), 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    return DenseNet(bottom, Concatenation(), head)


_KAGGLE: Mapping[str, Any] = {"bottom_mlp": (512, 256, 64), "top_mlp": (512, 256)}
_LARGE: Mapping[str, Any] = {"bottom_mlp": (512, 256), "top_mlp": (1024, 1024, 512, 256)}
_CONCATENATION: Mapping[str, Any] = {"net": "benchmark.workloads:concatenation"}
WORKLOADS = {
    "W1": Workload("W1", KAGGLE_ROWS, 16, 1, 2048, dense=_KAGGLE),
    "W2": Workload("W2", (200_000,) * 8, 64, 20, 1024, dense=_CONCATENATION),
    "W3": Workload("W3", KAGGLE_ROWS, 16, 1, 128, dense=_KAGGLE),
    "W4": Workload("W4", (80_000,) * 40, 24, 3, 256, 2, 1, _CONCATENATION),
    "W5": Workload("W5", (1_000_000,) * 6, 96, 10, 512, 3, 2, _CONCATENATION, varies=True),
    "W6": Workload("W6", (5_000,) * 60, 12, 1, 128, 1, 1, _CONCATENATION),
    "W7": Workload("W7", KAGGLE_ROWS, 64, 1, 4096, dense=_LARGE),
}


def bag_offsets(sparse: SparseFeatures) -> Tensor:
    """Return the start of each bag and the end of the last, of shape (K * B + 1), also without offsets."""
    return torch.arange(len(sparse.ids_L) + 1) if sparse.offsets is None else sparse.offsets


def _offsets(lengths_KB: Tensor) -> Tensor:
    return F.pad(lengths_KB.flatten().cumsum(0), (1, 0))


def _concatenate(slices: Sequence[Batch]) -> Batch:
    """Return the global batch of the slices of all trainers."""
    sparse = [each.sparse_features for each in slices]
    num_features = sparse[0].num_features
    lengths = [bag_offsets(each).diff().view(num_features, -1) for each in sparse]
    ids = [s.ids_L.split(each.sum(1).tolist()) for s, each in zip(sparse, lengths, strict=True)]
    ids_L = torch.cat([of_slice for of_feature in zip(*ids, strict=True) for of_slice in of_feature])
    offsets = None if sparse[0].offsets is None else _offsets(torch.cat(lengths, 1))
    dense_BF = torch.cat([each.dense_features for each in slices])
    labels_B = torch.cat([each.labels for each in slices])
    return Batch(dense_BF, SparseFeatures(ids_L, offsets, None, num_features), labels_B, len(labels_B))

"""The workloads: tables, nets, initial weights and batches, the same for all systems.

=== ============================= ============== ======== ======================== ===================
    shape                         rows, width    ids      dense net                samples a step
=== ============================= ============== ======== ======================== ===================
W1  DLRM on Criteo's Kaggle data  26 tables, 16  1        13-512-256-64-16, dots,  2 trainers x 2048
                                                          367-512-256-1
W2  embedding-heavy               8 x 200k, 64   20       13-64, beside the        2 trainers x 1024
                                                          vectors, 576-64-1
W3  latency-bound                 as W1          as W1    as W1                    2 trainers x 128
W4  many tables, one worker       40 x 80k, 24   3        as W2                    2 trainers x 256
W5  wide rows                     6 x 1M, 96     0 to 20  as W2                    3 trainers x 512
W6  one trainer, one worker       60 x 5k, 12    1        as W2                    1 trainer x 128
=== ============================= ============== ======== ======================== ===================

Dense features are N(0, 1), labels 1 with probability a quarter, ids floor(rows * u^3) with u uniform, so that
small ones are frequent. SGD with learning rate 0.1, for dense nets and tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.durations import PRODUCTS
from hybrid.batch import Batch, SparseFeatures
from hybrid.config import ClusterSection, DenseSection, EmbeddingSection, RunConfig, TrainSection
from hybrid.dense.net_builder import build_dense_net
from hybrid.embedding.table_spec import TableSpec
from hybrid.engine.model_builder import table_specs
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.models.dense_net import Concatenation, DenseNet

LEARNING_RATE = 0.1
LEARNING_RATES = {"adam": 0.001}  # where another one is usual
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
    """A workload, or a variation of one.

    Attributes:
        table_rows, dim: one table a feature.
        hotness: ids of a feature in a sample.
        varies: whether that is their mean, and a sample has from none to twice as many.
        trainer_batch: samples of a trainer in a step.
        dense: keys of ``[dense]``, of the net.
        optimizer: of the tables, all with sum pooling.
        products: of every system's dense net, of ``PRODUCTS``.
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
    varies: bool = False
    products: str = "float32"

    @property
    def global_batch(self) -> int:
        return self.trainers * self.trainer_batch

    @property
    def input_spec(self) -> InputSpec:
        features = (FeatureSpec(f"c{k}", rows, self.is_multi_hot) for k, rows in enumerate(self.table_rows))
        return InputSpec(tuple(f"x{f}" for f in range(NUM_DENSE)), tuple(features))

    @property
    def is_multi_hot(self) -> bool:
        return self.varies or self.hotness > 1

    @property
    def ids_per_sample(self) -> dict[str, float]:
        """Mean numbers of ids of the multi-hot features."""
        return {each.name: float(self.hotness) for each in self.input_spec.sparse_features if each.multi_hot}

    @property
    def table_learning_rate(self) -> float:
        return LEARNING_RATES.get(self.optimizer, LEARNING_RATE)

    def config(self) -> RunConfig:
        """Return the configuration of the run."""
        return RunConfig(
            cluster=ClusterSection(trainers=self.trainers, workers=self.workers),
            embedding=EmbeddingSection(
                dim=self.dim, optimizer=self.optimizer, learning_rate=self.table_learning_rate
            ),
            train=TrainSection(batch_size=self.global_batch),
            dense=DenseSection(
                optimizer="SGD",
                learning_rate=LEARNING_RATE,
                device="cpu",
                autocast=PRODUCTS[self.products],
                **self.dense,
            ),
        )

    def by(self, products: str) -> Workload:
        """Return the workload in this precision; the name omits float32."""
        name = self.name if products == "float32" else f"{self.name} by {products}"
        return dataclasses.replace(self, name=name, products=products)

    @property
    def is_in_bfloat16(self) -> bool:
        """Whether dense nets compute under autocast."""
        return self.config().dense.autocast == "bfloat16"

    def tables(self) -> tuple[TableSpec, ...]:
        return table_specs(self.config(), self.input_spec)

    def dense_net(self) -> nn.Module:
        """Return the net with the initial weights, in the precision of the workload."""
        net = build_dense_net(self.config(), self.input_spec, [self.dim] * len(self.table_rows))
        return InBfloat16(net) if self.is_in_bfloat16 else net

    def batches(self, trainer: int) -> Sequence[Batch]:
        """Return the batches of one trainer."""
        shape = self.table_rows, self.hotness, self.varies, self.trainer_batch, self.trainers
        return _batches(*shape, trainer)

    def global_batches(self) -> list[Batch]:
        """Return the global batches, for one process."""
        return [_joined(parts) for parts in zip(*map(self.batches, range(self.trainers)), strict=True)]


_KAGGLE: Mapping[str, Any] = {"bottom_mlp": (512, 256, 64), "top_mlp": (512, 256)}
_CONCATENATION: Mapping[str, Any] = {"net": "benchmark.workloads:concatenation"}
WORKLOADS = {
    "W1": Workload("W1", KAGGLE_ROWS, 16, 1, 2048, dense=_KAGGLE),
    "W2": Workload("W2", (200_000,) * 8, 64, 20, 1024, dense=_CONCATENATION),
    "W3": Workload("W3", KAGGLE_ROWS, 16, 1, 128, dense=_KAGGLE),
    "W4": Workload("W4", (80_000,) * 40, 24, 3, 256, 2, 1, _CONCATENATION),
    "W5": Workload("W5", (1_000_000,) * 6, 96, 10, 512, 3, 2, _CONCATENATION, varies=True),
    "W6": Workload("W6", (5_000,) * 60, 12, 1, 128, 1, 1, _CONCATENATION),
}


class InBfloat16(nn.Module):
    """A net under autocast, from float32 to float32, like ``dense.autocast`` of this project."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, dense_BF: Tensor, pooled_BE: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits_B: Tensor = self.net(dense_BF, pooled_BE)
        return logits_B.float()


def concatenation(config: RunConfig, input_spec: InputSpec, widths: list[int]) -> DenseNet:
    """The dense net of W2."""
    bottom = nn.Sequential(nn.Linear(NUM_DENSE, 64), nn.ReLU())
    head = nn.Sequential(nn.Linear(64 + sum(widths), 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    return DenseNet(bottom, Concatenation(), head)


@cache
def _batches(
    table_rows: tuple[int, ...], hotness: int, varies: bool, size: int, trainers: int, trainer: int
) -> list[Batch]:
    generator = torch.Generator().manual_seed(100 * trainers + trainer)
    return [_batch(table_rows, hotness, varies, size, trainers, generator) for _ in range(NUM_BATCHES)]


def _batch(
    table_rows: tuple[int, ...],
    hotness: int,
    varies: bool,
    size: int,
    trainers: int,
    generator: torch.Generator,
) -> Batch:
    num_features = len(table_rows)
    lengths_KB = torch.full((num_features, size), hotness)
    if varies:
        lengths_KB = torch.randint(0, 2 * hotness + 1, (num_features, size), generator=generator)
    rows_L = torch.tensor(table_rows).repeat_interleave(lengths_KB.sum(1))
    uniform_L = torch.rand(len(rows_L), generator=generator, dtype=torch.float64)
    ids_L = (rows_L * uniform_L.pow(3)).long()
    offsets = None if hotness == 1 and not varies else _offsets(lengths_KB)
    dense_BF = torch.randn(size, NUM_DENSE, generator=generator)
    labels_B = (torch.rand(size, generator=generator) < 0.25).float()
    return Batch(dense_BF, SparseFeatures(ids_L, offsets, None, num_features), labels_B, size * trainers)


def _offsets(lengths_KB: Tensor) -> Tensor:
    return F.pad(lengths_KB.flatten().cumsum(0), (1, 0))


def _joined(parts: Sequence[Batch]) -> Batch:
    sparse = [p.sparse_features for p in parts]
    num_features, has_bags = sparse[0].num_features, sparse[0].offsets is not None
    offsets = [torch.arange(len(s.ids_L) + 1) if s.offsets is None else s.offsets for s in sparse]
    lengths = [each.diff().view(num_features, -1) for each in offsets]
    of_feature = [s.ids_L.split(of.sum(1).tolist()) for s, of in zip(sparse, lengths, strict=True)]
    ids_L = torch.cat([ids for of_parts in zip(*of_feature, strict=True) for ids in of_parts])
    joined = SparseFeatures(ids_L, _offsets(torch.cat(lengths, 1)) if has_bags else None, None, num_features)
    labels_B = torch.cat([p.labels for p in parts])
    return Batch(torch.cat([p.dense_features for p in parts]), joined, labels_B, len(labels_B))

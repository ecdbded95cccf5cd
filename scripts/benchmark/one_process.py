"""One process without a cluster: the global batch, on the cores of all trainers and workers.

The tables are ``nn.EmbeddingBag``, one a table, with sparse gradients; or those of FBGEMM, which looks all
tables up by one kernel and updates them in another, within the backward pass.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark import mark
from benchmark.job import Job
from benchmark.start import bag_offsets, bags_by_feature, initial_rows
from benchmark.workloads import LEARNING_RATE, Workload
from hybrid.batch import SparseFeatures
from hybrid.config.table_sections import TABLE_OPTIMIZERS

NUM_THREADS = 2
Bags = Sequence[tuple[Tensor, Tensor]]  # ids and offsets, each tuple for one call


class Sample(NamedTuple):
    """A global batch, with ids in the format of the tables."""

    dense_BF: Tensor
    bags: Bags
    labels_B: Tensor


class TorchTables(nn.Module):
    """One ``nn.EmbeddingBag`` per table."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(rows_RD, freeze=False, mode="sum", sparse=True)
            for rows_RD in initial_rows(workload).values()
        )

    def forward(self, bags: Bags) -> Tensor:
        return torch.cat([table(*bag) for table, bag in zip(self.tables, bags, strict=True)], dim=1)


class FbgemmTables(nn.Module):
    """All tables in one module of FBGEMM, with a fused optimizer."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        # Only the environment of the bench has FBGEMM.
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        from benchmark.fused import fused_optimizer

        rows = initial_rows(workload).values()
        self.kernels = SplitTableBatchedEmbeddingBagsCodegen(
            [(*rows_RD.shape, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows_RD in rows],
            pooling_mode=PoolingMode.SUM,
            device=torch.device("cpu"),
            **fused_optimizer(workload),
        )
        for weight_RD, rows_RD in zip(self.kernels.split_embedding_weights(), rows, strict=True):
            weight_RD.copy_(rows_RD)

    def forward(self, bags: Bags) -> Tensor:
        (bag,) = bags
        pooled_BE: Tensor = self.kernels(*bag)
        return pooled_BE


def main() -> None:
    """Train the job of the environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", choices=("torch", "fbgemm"), default="torch", help="of the tables")
    is_fused = parser.parse_args().kernels == "fbgemm"
    torch.set_num_threads(NUM_THREADS)
    job = Job.from_environment()
    net = job.workload.dense_net()
    tables = FbgemmTables(job.workload) if is_fused else TorchTables(job.workload)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)]
    if not is_fused:
        optimizers.append(sparse_optimizer(job.workload, tables))

    def step(sample: Sample) -> float:
        logits_B = net(sample.dense_BF, tables(sample.bags))
        loss = F.binary_cross_entropy_with_logits(logits_B, sample.labels_B)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    samples = cycle(_samples(job.workload, _one_call if is_fused else bags_by_feature))
    losses = [step(sample) for sample in islice(samples, job.num_warm_up)]
    mark.begin()
    start = time.perf_counter()
    losses += [step(sample) for sample in islice(samples, job.num_steps)]
    mark.end(time.perf_counter() - start, losses)


def sparse_optimizer(workload: Workload, tables: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of torch for sparse gradients; torch has no row-wise Adagrad."""
    embedding = workload.config().embedding
    rate, parameters = embedding.learning_rate, list(tables.parameters())
    arguments = TABLE_OPTIMIZERS.parse("embedding.optimizer", embedding.optimizer).arguments
    if workload.optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, lr=rate, eps=arguments["eps"])
    if workload.optimizer == "adam":
        return torch.optim.SparseAdam(parameters, lr=rate, eps=arguments["eps"])
    return torch.optim.SGD(parameters, lr=rate)


def _samples(workload: Workload, bags: Callable[[SparseFeatures], Bags]) -> list[Sample]:
    batches = workload.global_batches()
    return [Sample(b.dense_features, bags(b.sparse_features), b.labels) for b in batches]


def _one_call(sparse: SparseFeatures) -> Bags:
    return [(sparse.ids_L, bag_offsets(sparse))]


if __name__ == "__main__":
    main()

"""Training on global batches in one process, with ``nn.EmbeddingBag`` or the tables of FBGEMM.

FBGEMM looks up all tables by one kernel, and updates them by another within the backward pass.
"""

import argparse
from collections.abc import Iterable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.job import Job
from benchmark.workloads import LEARNING_RATE, Workload, bag_offsets
from hybrid.batch import SparseFeatures

NUM_THREADS = 2
Bags = list[tuple[Tensor, Tensor]]  # ids and offsets for each call of a table


class TorchTables(nn.Module):
    """One ``nn.EmbeddingBag`` per table."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(rows_RD, freeze=False, mode="sum", sparse=True)
            for rows_RD in workload.initial_rows().values()
        )

    def forward(self, bags: Bags) -> Tensor:
        return torch.cat([table(*bag) for table, bag in zip(self.tables, bags, strict=True)], dim=1)

    def prepare(self, sparse: SparseFeatures) -> Bags:
        """Return ids and offsets of each feature in separate tensors."""
        offsets = bag_offsets(sparse)
        starts_K = offsets[:: sparse.batch_size].tolist()
        offsets_KB = offsets[:-1].view(sparse.num_features, -1)
        return [
            (sparse.ids_L[first:last].clone(), offsets_B - first)
            for (first, last), offsets_B in zip(pairwise(starts_K), offsets_KB, strict=True)
        ]


class FbgemmTables(nn.Module):
    """All tables in one module of FBGEMM, with fused SGD. It has no parameters for an optimizer."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        # Only the environment of the benchmark has FBGEMM.
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        rows = workload.initial_rows().values()
        self.kernels = SplitTableBatchedEmbeddingBagsCodegen(
            [(*rows_RD.shape, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows_RD in rows],
            pooling_mode=PoolingMode.SUM,
            device=torch.device("cpu"),
            optimizer=EmbOptimType.EXACT_SGD,
            learning_rate=LEARNING_RATE,
        )
        for weight_RD, rows_RD in zip(self.kernels.split_embedding_weights(), rows, strict=True):
            weight_RD.copy_(rows_RD)

    def forward(self, bags: Bags) -> Tensor:
        (bag,) = bags
        pooled_BE: Tensor = self.kernels(*bag)
        return pooled_BE

    def prepare(self, sparse: SparseFeatures) -> Bags:
        """Return ids and offsets of all features."""
        return [(sparse.ids_L, bag_offsets(sparse))]


def main() -> None:
    """Train the job of the environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fbgemm", action="store_true", help="use the tables of FBGEMM")
    is_fused = parser.parse_args().fbgemm
    torch.set_num_threads(NUM_THREADS)
    job = Job.from_environment()
    net = job.workload.dense_net()
    tables = FbgemmTables(job.workload) if is_fused else TorchTables(job.workload)
    parameters: Iterable[Tensor] = net.parameters() if is_fused else [*net.parameters(), *tables.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
    batches = job.workload.global_batches()
    bags = [tables.prepare(batch.sparse_features) for batch in batches]

    def step(index: int) -> float:
        batch = batches[index]
        logits_B = net(batch.dense_features, tables(bags[index]))
        loss = F.binary_cross_entropy_with_logits(logits_B, batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    job.measure(lambda steps: [step(each % len(batches)) for each in steps])


if __name__ == "__main__":
    main()

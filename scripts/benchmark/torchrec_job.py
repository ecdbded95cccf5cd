"""TorchRec: one rank per trainer and no workers; each rank holds whole tables and a replica of the net.

Tables have FBGEMM's fused kernels, which take the steps of their optimizer within the backward pass.
TorchRec divides the gradients of tables by the number of ranks (the default of ``set_gradient_division``), as
DDP does with dense gradients. Batches have equal sizes, so a step follows the mean loss of the global batch.

``TrainPipelineSparseDist`` sends the ids of the next step during the current one; the results are the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, multiprocessing, nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from benchmark.job import Job
from benchmark.workloads import LEARNING_RATE, Workload, bag_offsets
from hybrid.batch import Batch

CPU = torch.device("cpu")


@dataclass
class Sample(Pipelineable):  # type: ignore[misc]  # mypy has no TorchRec
    """The batch of a rank, with the interface that the pipeline needs."""

    dense_BF: Tensor
    sparse: KeyedJaggedTensor
    labels_B: Tensor

    def to(self, device: torch.device, non_blocking: bool) -> Sample:
        parts = (self.dense_BF, self.sparse, self.labels_B)
        return Sample(*(part.to(device=device, non_blocking=non_blocking) for part in parts))

    def record_stream(self, stream: torch.Stream) -> None:
        for part in (self.dense_BF, self.sparse, self.labels_B):
            part.record_stream(stream)


class Model(nn.Module):
    """Tables and dense net; returns the loss twice, for autograd and for reports, as pipelines require."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        rows = workload.initial_rows()
        self.names = list(rows)
        configs = [
            EmbeddingBagConfig(
                name=name,
                embedding_dim=rows_RD.size(1),
                num_embeddings=rows_RD.size(0),
                feature_names=[name],
                pooling=PoolingType.SUM,
                init_fn=partial(_copy_rows, rows_RD),
            )
            for name, rows_RD in rows.items()
        ]
        self.tables = EmbeddingBagCollection(configs, device=torch.device("meta"))
        self.net = workload.dense_net()

    def forward(self, sample: Sample) -> tuple[Tensor, Tensor]:
        pooled = self.tables(sample.sparse).to_dict()  # its columns are in the order of ranks
        logits_B = self.net(sample.dense_BF, torch.cat([pooled[name] for name in self.names], dim=1))
        loss = F.binary_cross_entropy_with_logits(logits_B, sample.labels_B)
        return loss, loss.detach()


def shard(model: Model, workload: Workload) -> DistributedModelParallel:
    """Place the tables evenly on the ranks, large tables on different ranks, and the net under DDP."""
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    tables = construct_module_sharding_plan(
        model.tables,
        {
            name: table_wise(rank, compute_kernel=EmbeddingComputeKernel.FUSED.value)
            for name, rank in balanced_layout(workload).items()
        },
        sharder,
        local_size=workload.trainers,
        world_size=workload.trainers,
        device_type="cpu",
    )
    plan = ShardingPlan({"tables": tables})
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])


def balanced_layout(workload: Workload) -> dict[str, int]:
    """Return the rank of each table: in order of size, back and forth over the ranks."""
    there_and_back = [*range(workload.trainers), *reversed(range(workload.trainers))]
    by_size = sorted(workload.tables, key=lambda table: -table.num_rows)
    return {table.name: rank for table, rank in zip(by_size, cycle(there_and_back), strict=False)}


def main(rank: int, job: Job) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    init_method = Path(job.result).with_name("ranks").as_uri()
    num_ranks = job.workload.trainers
    dist.init_process_group("gloo", init_method, rank=rank, world_size=num_ranks)
    model = Model(job.workload)
    optimizer = torch.optim.SGD(list(model.net.parameters()), lr=LEARNING_RATE)
    pipeline = TrainPipelineSparseDist(shard(model, job.workload), optimizer, CPU)
    samples = cycle([_sample(batch, model.names) for batch in job.workload.batches(rank)])

    def train(steps: range) -> list[float]:
        losses = torch.stack([pipeline.progress(samples) for _ in steps])
        dist.all_reduce(losses)
        return [loss / num_ranks for loss in losses.tolist()]

    if rank == 0:
        job.measure(train)
    else:
        train(range(job.num_warm_up))
        train(range(job.num_steps))
    dist.barrier()  # rank 0 has measured all processes
    dist.destroy_process_group()


def _sample(batch: Batch, names: list[str]) -> Sample:
    sparse = batch.sparse_features
    lengths = bag_offsets(sparse).diff().int()
    ids = KeyedJaggedTensor.from_lengths_sync(keys=names, values=sparse.ids_L, lengths=lengths)
    return Sample(batch.dense_features, ids, batch.labels)


def _copy_rows(rows_RD: Tensor, weight_RD: Tensor) -> None:
    if weight_RD.numel():  # else another rank has the table
        weight_RD.detach().copy_(rows_RD)


if __name__ == "__main__":
    the_job = Job.from_environment()
    multiprocessing.spawn(main, args=(the_job,), nprocs=the_job.workload.trainers)

"""TorchRec: one rank per trainer and no workers; each rank holds whole tables and a replica of the net.

Tables have FBGEMM's fused kernels, which take the steps of their optimizer within the backward pass.
TorchRec divides their gradients by the number of ranks (``set_gradient_division``, as it is by default) and
DDP those of the dense net, so that with equal batches and each rank's mean loss a step is that of the global
batch's mean.

``--pipelined`` takes steps by ``TrainPipelineSparseDist``, which sends the ids of the next step around while
this one is computed. What is computed is the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
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

from benchmark import mark, ranks
from benchmark.fused import fused_optimizer
from benchmark.job import Job
from benchmark.start import bag_offsets, initial_rows
from benchmark.workloads import LEARNING_RATE, Workload
from hybrid.batch import Batch

CPU = torch.device("cpu")
Step = Callable[[], Tensor]


@dataclass
class Sample(Pipelineable):  # type: ignore[misc]  # TorchRec is not there for mypy
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
    """Tables and dense net; returns the loss twice, to differentiate and to report, as pipelines need it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        rows = initial_rows(workload)
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
    sharder = EmbeddingBagCollectionSharder(fused_params=fused_optimizer(workload))
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
    by_size = sorted(workload.tables(), key=lambda table: -table.num_rows)
    return {table.name: rank for table, rank in zip(by_size, cycle(there_and_back), strict=False)}


def main(rank: int, meeting_point: Path, is_pipelined: bool) -> None:
    """Run one rank."""
    job = Job.from_environment()
    init_method = (meeting_point / "ranks").as_uri()
    dist.init_process_group("gloo", init_method, rank=rank, world_size=job.workload.trainers)
    model = Model(job.workload)
    dense_parameters = list(model.net.parameters())
    sharded = shard(model, job.workload)
    optimizer = torch.optim.SGD(dense_parameters, lr=LEARNING_RATE)
    samples = cycle([_sample(batch, model.names) for batch in job.workload.batches(rank)])
    step = (_pipelined_step if is_pipelined else _plain_step)(sharded, optimizer, samples)
    _measure(step, job)
    dist.destroy_process_group()


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, samples: Iterator[Sample]) -> Step:
    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor
        reported: Tensor
        loss, reported = model(next(samples))
        loss.backward()
        optimizer.step()
        return reported

    return step


def _pipelined_step(model: nn.Module, optimizer: torch.optim.Optimizer, samples: Iterator[Sample]) -> Step:
    pipeline = TrainPipelineSparseDist(model, optimizer, CPU)

    def step() -> Tensor:
        reported: Tensor = pipeline.progress(samples)
        return reported

    return step


def _measure(step: Step, job: Job) -> None:
    is_first = dist.get_rank() == 0
    losses = [step() for _ in range(job.num_warm_up)]
    dist.barrier()
    if is_first:
        mark.begin()
    start = time.perf_counter()
    losses += [step() for _ in range(job.num_steps)]
    dist.barrier()
    seconds = time.perf_counter() - start
    mean_losses = torch.stack(losses)
    dist.all_reduce(mean_losses, dist.ReduceOp.SUM)
    if is_first:
        mark.end(seconds, (mean_losses / job.workload.trainers).tolist())


def _sample(batch: Batch, names: list[str]) -> Sample:
    sparse = batch.sparse_features
    lengths = bag_offsets(sparse).diff().int()
    ids = KeyedJaggedTensor.from_lengths_sync(keys=names, values=sparse.ids_L, lengths=lengths)
    return Sample(batch.dense_features, ids, batch.labels)


def _copy_rows(rows_RD: Tensor, weight_RD: Tensor) -> None:
    if weight_RD.numel():  # else the table is another rank's
        weight_RD.detach().copy_(rows_RD)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipelined", action="store_true", help="send the next step's ids meanwhile")
    arguments = parser.parse_args()
    preload = ["torchrec.distributed.train_pipeline", "torch._dynamo"]
    ranks.run(main, Job.from_environment().workload.trainers, (arguments.pipelined,), preload)

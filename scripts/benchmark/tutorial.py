"""The pattern of PyTorch's tutorial "Combining Distributed DataParallel with Distributed RPC Framework".

As there: a master creates the tables on other processes, as ``RemoteModule``s of ``nn.EmbeddingBag``, and
calls the trainers; a trainer's net is under DDP, its backward pass a distributed one, and
``DistributedOptimizer`` steps dense net and tables. There it is one table on one server; here each table is a
``RemoteModule``, they lie on the workers in turn, and a trainer calls one after another. Their gradients are
sparse, since those of the tutorial would have the size of the tables. Transport is what torch chooses, as
there; ``--tcp`` takes TCP alone, which is faster where there are more processes than cores.

The losses are not those of synchronous SGD. Each trainer's gradient is an update of its own: a row moves by
the sum of the trainers' gradients, each of the mean over that trainer's batch, where the mean over the global
batch moves it by their mean: half as far, with two trainers. The dense net does move by the mean, through
DDP. And no lookup waits for the other trainers' updates, so that losses vary from run to run.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd, rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmark import mark, ranks
from benchmark.start import bags_by_feature, initial_rows, sgd_job
from benchmark.workloads import LEARNING_RATE, Workload

MASTER = "master"


class Sample(NamedTuple):
    """The batch of a trainer, with separate ids and offsets per table."""

    dense_BF: Tensor
    bags: list[tuple[Tensor, Tensor]]
    labels_B: Tensor


class HybridModel(nn.Module):
    """The remote tables, and the net under DDP."""

    def __init__(self, tables: Sequence[RemoteModule], net: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.net = DistributedDataParallel(net)

    def forward(self, sample: Sample) -> Tensor:
        pooled = [table.forward(*bag) for table, bag in zip(self.tables, sample.bags, strict=True)]
        logits_B: Tensor = self.net(sample.dense_BF, torch.cat(pooled, dim=1))
        return logits_B


class Trainer:
    """A trainer, created and called by the master."""

    def __init__(self, workload: Workload, trainer: int, tables: Sequence[RemoteModule]) -> None:
        self._model = HybridModel(tables, workload.dense_net())
        parameters = [parameter for table in tables for parameter in table.remote_parameters()]
        parameters += [rpc.RRef(parameter) for parameter in self._model.net.parameters()]
        self._optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=LEARNING_RATE)
        self._samples: Iterator[Sample] = cycle(
            [
                Sample(batch.dense_features, bags_by_feature(batch.sparse_features), batch.labels)
                for batch in workload.batches(trainer)
            ]
        )

    def train(self, num_steps: int) -> list[float]:
        """Take the next steps; return the mean loss of each over the batch of this trainer."""
        return [self._step(sample) for sample in islice(self._samples, num_steps)]

    def _step(self, sample: Sample) -> float:
        with dist_autograd.context() as context_id:
            loss = F.binary_cross_entropy_with_logits(self._model(sample), sample.labels_B)
            dist_autograd.backward(context_id, [loss])
            self._optimizer.step(context_id)
        return loss.item()


def main(rank: int, meeting_point: Path, transports: list[str] | None) -> None:
    """Run one process; the ranks are the master, the trainers and the workers."""
    workload = sgd_job().workload
    trainers = [_trainer(t) for t in range(workload.trainers)]
    names = [MASTER, *trainers, *(_worker(w) for w in range(workload.workers))]
    if names[rank] in trainers:
        init_method = (meeting_point / "trainers").as_uri()
        dist.init_process_group("gloo", init_method, rank=rank - 1, world_size=len(trainers))
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=(meeting_point / "rpc").as_uri(),
        rpc_timeout=ranks.LIMIT_SECONDS,
        _transports=transports,
    )
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    if names[rank] == MASTER:
        _measure()
    rpc.shutdown(timeout=ranks.LIMIT_SECONDS)
    if names[rank] in trainers:
        dist.destroy_process_group()


def _measure() -> None:
    job = sgd_job()
    tables = _create_tables(job.workload)
    trainers = [
        rpc.remote(_trainer(t), Trainer, args=(job.workload, t, tables)) for t in range(job.workload.trainers)
    ]
    losses = _train(trainers, job.num_warm_up)
    mark.begin()
    start = time.perf_counter()
    losses += _train(trainers, job.num_steps)
    mark.end(time.perf_counter() - start, losses)


def _create_tables(workload: Workload) -> list[RemoteModule]:
    return [
        RemoteModule(
            f"{_worker(k % workload.workers)}/cpu",
            nn.EmbeddingBag,
            args=tuple(rows_RD.shape),
            kwargs={"mode": "sum", "sparse": True, "_weight": rows_RD},
        )
        for k, rows_RD in enumerate(initial_rows(workload).values())
    ]


def _train(trainers: Sequence[rpc.RRef[Trainer]], num_steps: int) -> list[float]:
    """Return the mean loss of each step over all trainers."""
    calls = [trainer.rpc_async().train(num_steps) for trainer in trainers]
    losses = [call.wait() for call in calls]
    return [sum(step) / len(trainers) for step in zip(*losses, strict=True)]


def _trainer(index: int) -> str:
    return f"trainer{index}"


def _worker(index: int) -> str:
    return f"worker{index}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tcp", action="store_true", help="over TCP alone")
    chosen = ["uv"] if parser.parse_args().tcp else None
    shape = sgd_job().workload
    ranks.run(main, 1 + shape.trainers + shape.workers, (chosen,), preload=["torch._dynamo"])

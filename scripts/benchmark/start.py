"""What the other systems start from: their job, the rows of their tables, ids as these take them."""

from itertools import pairwise

import torch
from torch import Tensor

from benchmark.job import Job
from benchmark.workloads import Workload
from hybrid.batch import SparseFeatures
from hybrid.embedding.worker.initial_rows import initialise_rows


def sgd_job() -> Job:
    """The job of this process.

    Raises:
        ValueError: its tables are not trained by SGD, which is all that the other systems are set up for.
    """
    job = Job.from_environment()
    if job.workload.optimizer != "sgd":
        raise ValueError(f"the tables of {job.workload.name} want {job.workload.optimizer}, not sgd")
    return job


def initial_rows(workload: Workload) -> dict[str, Tensor]:
    """The rows that this project's tables start with, by table."""
    seed = workload.config().run.seed
    rows = {}
    for table in workload.tables():
        rows[table.name] = torch.empty(table.num_rows, table.dim)
        initialise_rows(rows[table.name], seed, table.name, table.init_scale)
    return rows


def bag_offsets(sparse: SparseFeatures) -> Tensor:
    """Where each bag starts, (K * B + 1), also where every bag holds one id."""
    return torch.arange(len(sparse.ids_L) + 1) if sparse.offsets is None else sparse.offsets


def bags_by_feature(sparse: SparseFeatures) -> list[tuple[Tensor, Tensor]]:
    """For an ``nn.EmbeddingBag`` a feature: its ``ids_L`` and ``offsets_B``, in tensors of their own."""
    starts_K = bag_offsets(sparse)[:: sparse.batch_size].tolist()
    offsets_KB = bag_offsets(sparse)[:-1].view(sparse.num_features, -1)
    return [
        (sparse.ids_L[first:last].clone(), offsets_B - first)
        for (first, last), offsets_B in zip(pairwise(starts_K), offsets_KB, strict=True)
    ]

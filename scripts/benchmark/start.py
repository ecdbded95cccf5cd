"""Inputs of the other systems: job, initial rows of tables, and ids in their formats."""

from itertools import pairwise

import torch
from torch import Tensor

from benchmark.job import Job
from benchmark.workloads import Workload
from hybrid.batch import SparseFeatures
from hybrid.embedding.initial_rows import fill_random_rows


def sgd_job() -> Job:
    """Return the job of this process.

    Raises:
        ValueError: the tables use another optimizer than SGD, which the other systems do not support.
    """
    job = Job.from_environment()
    if job.workload.optimizer != "sgd":
        raise ValueError(f"the tables of {job.workload.name} want {job.workload.optimizer}, not sgd")
    return job


def initial_rows(workload: Workload) -> dict[str, Tensor]:
    """Return the initial rows of this project's tables by name."""
    seed = workload.config().run.seed
    rows = {}
    for table in workload.tables():
        rows[table.name] = torch.empty(table.num_rows, table.dim)
        fill_random_rows(rows[table.name], seed, table.name, table.init_scale)
    return rows


def bag_offsets(sparse: SparseFeatures) -> Tensor:
    """Return the start of each bag, of shape (K * B + 1), also if every bag holds one id."""
    return torch.arange(len(sparse.ids_L) + 1) if sparse.offsets is None else sparse.offsets


def bags_by_feature(sparse: SparseFeatures) -> list[tuple[Tensor, Tensor]]:
    """Return ``ids_L`` and ``offsets_B`` for an ``nn.EmbeddingBag`` per feature, in separate tensors."""
    starts_K = bag_offsets(sparse)[:: sparse.batch_size].tolist()
    offsets_KB = bag_offsets(sparse)[:-1].view(sparse.num_features, -1)
    return [
        (sparse.ids_L[first:last].clone(), offsets_B - first)
        for (first, last), offsets_B in zip(pairwise(starts_K), offsets_KB, strict=True)
    ]

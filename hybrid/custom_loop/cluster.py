"""The interface of custom training loops: one script for a cluster and for one process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybrid.config.loading import load_config
from hybrid.custom_loop.backend import BACKEND, Backend, SingleProcess
from hybrid.custom_loop.embedding_modules import plain_copy
from hybrid.custom_loop.prepared_batches import PreparedData
from hybrid.custom_loop.training_loop import TrainingLoop
from hybrid.data.prepare.dataset_location import open_split
from hybrid.storage.remote_path import StoragePath, parse_path


def connect(config: str | Path | None = None) -> Cluster:
    """Return the cluster of this trainer; without ``hybrid run``, a cluster of one process.

    Seeds torch with ``run.seed``, so that all trainers build the same module, and one process as well.

    Args:
        config: TOML file for a single process; a cluster uses the configuration that it was started with.

    Raises:
        ConfigError: the file has an error.
    """
    backend = BACKEND.get(None) or SingleProcess(load_config(None if config is None else Path(config)))
    torch.manual_seed(backend.config.run.seed)
    return Cluster(backend)


class Cluster:
    """The trainers and workers of a custom training loop; made by :func:`connect`.

    Attributes:
        rank: index of this trainer, from 0. Trainer 0 prints and writes files.
        world_size: number of trainers. (The process groups of torch may count other roles.)
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._loop: TrainingLoop | None = None
        self.rank = backend.trainer
        self.world_size = backend.group.size()

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            renamed = {"trainer": "rank", "num_trainers": "world_size"}
            remedy = f"; write cluster.{renamed[name]}" if name in renamed else ""
            raise AttributeError(f"a cluster has no attribute {name!r}{remedy}")

    def prepare(self) -> tuple[PreparedData, PreparedData]:
        """Return the training and the test samples of the configuration's section [data].

        All trainers call it together. The master reads the files once, and keeps arrays of which each trainer
        reads its slice.

        Raises:
            ConfigError, DataError: the data cannot be prepared.
        """
        source, config = self._backend.prepare_data(), self._backend.config
        train, test = (open_split(source, split, config.data) for split in ("train", "test"))
        size, seed = config.train.batch_size, config.run.seed
        tasks = tuple(config.all_tasks)
        return (
            PreparedData(train, size, seed, config.data.is_shuffled, config.data.shuffle_lanes, tasks),
            PreparedData(test, size, seed, False, 0, tasks),
        )

    def distribute(self, module: nn.Module) -> Distributed:
        """Place the tables of ``module`` on the workers, and wrap the rest in DDP.

        All trainers call it together. The parameters become those of trainer 0. From then on, ``step()`` of
        any optimizer of ``torch.optim`` over these parameters is part of the step of all trainers and tables:
        gradients are scaled or dropped together, by ``train.clip_norm`` and ``train.non_finite``.

        Raises:
            RuntimeError: a module is already distributed.
        """
        if self._loop is not None:
            raise RuntimeError("a module is already distributed: make one module of both")
        self._loop = TrainingLoop(self._backend, module)
        return Distributed(self._loop)

    def batches(self, data: Any, size: int | None = None, whole: str | None = None) -> Iterator[Any]:
        """Yield this trainer's slice of each batch of ``data``; all trainers iterate over the same batches.

        Lookups of a batch leave as soon as it is read. Under ``torch.no_grad()``, batches are for evaluation.

        Args:
            data: an iterable of dicts, lists or tuples of tensors, such as a DataLoader; one of these with
                all samples; or a result of :meth:`prepare`.
            size: number of samples of a batch of all trainers; by default as the iterable gives them.
            whole: column with a group number per sample. The samples of a group must be adjacent; they stay
                in one batch and one slice. For ranking losses.

        Raises:
            DataError: a group of ``whole`` is split, or larger than ``size``.
        """
        return self._started().batches(data, size, whole)

    def backward(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        more: Sequence[tuple[Tensor, Tensor | None]] = (),
    ) -> None:
        """Compute the gradients of the mean loss over the batch of all trainers.

        Gradients of parameters are then in ``grad``; those of tables are on their way to the workers.

        Args:
            values: loss of each sample of this trainer's slice, (samples,).
            weights: weight of each sample, not negative, for a weighted mean.
            more: other losses, each with its weights or None; their means are added.

        Raises:
            DataError: there is not one value, or weight, per sample.
            NonFiniteError: the loss is not finite (``train.non_finite``).
        """
        self._started().backward([(values, weights), *more])

    def mean(self, values: Tensor) -> float:
        """Return the mean of all trainers' values, of any shape; NaN if there are none."""
        own = torch.tensor([values.detach().double().sum().item(), values.numel()], dtype=torch.float64)
        total, count = self._started().trainers.sum(own).tolist()
        return total / count if count else math.nan

    def gather(self, values: Tensor) -> Tensor:
        """Return all trainers' values, (samples, ...), in the order of the batch, on the CPU.

        A tensor that requires gradients stays on its device and gets the gradients of all trainers. Use it
        for losses that compare a sample with others of the batch; each trainer must have it in its loss.
        """
        return self._started().trainers.gather(values)

    def save(self, folder: str | StoragePath, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write a checkpoint of the tables, the module and its optimizer.

        All trainers call it together, between two steps.

        Args:
            folder: a new folder, on storage that all hosts share.

        Raises:
            CheckpointError: the folder exists or cannot be written; nothing is left of it.
        """
        self._started().save(parse_path(folder), optimizer)

    def load(self, folder: str | StoragePath, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Continue from a checkpoint, written by any number of trainers and workers; all trainers call it.

        Raises:
            CheckpointError: the checkpoint is of another model, or damaged.
        """
        self._started().load(parse_path(folder), optimizer)

    def plain_module(self) -> nn.Module:
        """Return a copy of the module with ``nn.Embedding`` and ``nn.EmbeddingBag``, with all rows.

        It needs memory for all rows, but no cluster and nothing of this project: save, export or serve it.
        """
        loop = self._started()
        return plain_copy(loop.model.net, loop.rows)

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self._started().step

    def print(self, *values: object) -> None:
        """Print on trainer 0 only."""
        if self.rank == 0:
            print(*values, flush=True)

    @property
    def device(self) -> torch.device:
        """Device of the module: move inputs there that are no ids."""
        return self._started().device

    def _started(self) -> TrainingLoop:
        if self._loop is None:
            raise RuntimeError("distribute the module first: model = cluster.distribute(model)")
        return self._loop


class Distributed(nn.Module):
    """A distributed module, with the attributes of the script's module.

    Attributes:
        module: the script's module.
    """

    module: Any

    def __init__(self, loop: TrainingLoop) -> None:
        super().__init__()
        self.module = loop.model.net
        object.__setattr__(self, "_loop", loop)  # no submodule

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Call the module: under DDP while gradients are enabled."""
        module = self._loop.model.module if torch.is_grad_enabled() else self.module
        return module(*args, **keywords)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

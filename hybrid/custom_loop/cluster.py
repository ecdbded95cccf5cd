"""A module and a loop of the user's own on a cluster, or in one process: the same file, the same numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybrid.config.loading import load_config
from hybrid.custom_loop.backend import HOST, Host
from hybrid.custom_loop.plain_copy import plain_copy
from hybrid.custom_loop.prepared_batches import PreparedData
from hybrid.custom_loop.single_process import Alone
from hybrid.custom_loop.training_loop import Loop
from hybrid.data.prepare.dataset_location import open_split
from hybrid.storage.remote_path import StoragePath, parse_path


def connect(config: str | Path | None = None) -> Cluster:
    """The cluster that this process is a trainer of, started by ``hybrid run``; else this process alone.

    Seeds torch with ``run.seed``, so that all trainers, and one process, build the same module.

    Args:
        config: a TOML file for a process alone; a cluster goes by that of its start.

    Raises:
        ConfigError: the file has a mistake.
    """
    host = HOST.get(None) or Alone(load_config(None if config is None else Path(config)))
    torch.manual_seed(host.config.run.seed)
    return Cluster(host)


class Cluster:
    """What trains a module of the user's own; made by :func:`connect`.

    Attributes:
        rank: index of this trainer, from 0; trainer 0 prints and writes files.
        world_size: number of trainers. Both are among trainers alone: torch.distributed's are not.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._loop: Loop | None = None
        self.rank = host.trainer
        self.world_size = host.group.size()

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            renamed = {"trainer": "rank", "num_trainers": "world_size"}
            remedy = f"; write cluster.{renamed[name]}" if name in renamed else ""
            raise AttributeError(f"a cluster has no attribute {name!r}{remedy}")

    def prepare(self) -> tuple[PreparedData, PreparedData]:
        """The training and the test samples of the configuration's section [data].

        All trainers call it at once. Files are read once, by the master, and kept as arrays, of which each
        trainer reads its own share.

        Raises:
            ConfigError, DataError: as ``hybrid launch`` would say it.
        """
        source, config = self._host.prepare(), self._host.config
        train, test = (open_split(source, split, config.data) for split in ("train", "test"))
        size, seed = config.train.batch_size, config.run.seed
        tasks = tuple(config.all_tasks)
        return (
            PreparedData(train, size, seed, config.data.is_shuffled, config.data.shuffle_lanes, tasks),
            PreparedData(test, size, seed, False, 0, tasks),
        )

    def distribute(self, module: nn.Module) -> Distributed:
        """Put the tables of ``module`` in place, and the rest under DDP.

        The module's own parameters become those of trainer 0. All trainers call it at once. From then on a
        ``step()`` of any optimizer of ``torch.optim`` over these parameters is part of a step of all
        trainers, and of the tables: their gradients are scaled or dropped alike, as ``train.clip_norm`` and
        ``train.non_finite`` say.

        Raises:
            RuntimeError: a module is distributed already.
        """
        if self._loop is not None:
            raise RuntimeError("one module is distributed already: put both into one")
        self._loop = Loop(self._host, module)
        return Distributed(self._loop)

    def batches(self, data: Any, size: int | None = None, whole: str | None = None) -> Iterator[Any]:
        """This trainer's share of each batch of ``data``; all trainers go through the same ones.

        Their lookups leave as soon as a batch is known. Under ``torch.no_grad()`` they are evaluated on.

        Args:
            data: an iterable of dicts (lists, tuples) of tensors, such as a DataLoader; one, whole; or what
                :meth:`prepare` gives.
            size: samples of a batch of all trainers together; by default as the iterable gives them.
            whole: a column of one number a sample, equal ones of which stand together and stay together: in
                one share, and in batches of ``size`` too; for losses of the order within groups.

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
        """Take the gradients of the mean of a loss over the whole batch, of all trainers together.

        Parameters then have theirs in ``grad``; those of tables are with the workers.

        Args:
            values: the loss of each sample of this trainer's share, (samples,).
            weights: of each sample, not negative; the mean is weighted by them.
            more: other losses, each with weights of its own or None; their means are added.

        Raises:
            DataError: there is not one value, or weight, for each sample.
            NonFiniteError: the loss is not finite (``train.non_finite``).
        """
        self._started().backward([(values, weights), *more])

    def mean(self, values: Tensor) -> float:
        """The mean of all trainers' values, of any shape; NaN of none."""
        own = torch.tensor([values.detach().double().sum().item(), values.numel()], dtype=torch.float64)
        total, count = self._started().trainers.sum(own).tolist()
        return total / count if count else math.nan

    def gather(self, values: Tensor) -> Tensor:
        """All trainers' values, (samples, ...), in the order of the whole batch; on the CPU.

        What requires gradients stays where it is and gets those of all trainers, for a loss that compares a
        sample with all others of the batch; every trainer then has it in its loss.
        """
        return self._started().trainers.gathered(values)

    def save(self, folder: str | StoragePath, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write a checkpoint of all tables, the module and its optimizer.

        All trainers call it at once, between two steps.

        Args:
            folder: that does not exist yet; on storage that all hosts share.

        Raises:
            CheckpointError: it exists, or cannot be written; nothing is left of it.
        """
        self._started().save(parse_path(folder), optimizer)

    def load(self, folder: str | StoragePath, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Go on from a checkpoint, of any number of trainers and workers; all trainers call it at once.

        Raises:
            CheckpointError: it is of another model, or damaged.
        """
        self._started().load(parse_path(folder), optimizer)

    def plain_module(self) -> nn.Module:
        """A copy of the module in plain PyTorch: ``nn.Embedding`` and ``nn.EmbeddingBag``, with all rows.

        It needs neither a cluster nor this project, and the memory for all rows: to be exported and served.
        """
        loop = self._started()
        return plain_copy(loop.model.net, loop.rows)

    @property
    def step(self) -> int:
        """How many steps are taken."""
        return self._started().step

    def print(self, *values: object) -> None:
        """Print on trainer 0 alone."""
        if self.rank == 0:
            print(*values, flush=True)

    @property
    def device(self) -> torch.device:
        """Where the module computes, and wants what it does not look up."""
        return self._started().device

    def _started(self) -> Loop:
        if self._loop is None:
            raise RuntimeError("first have a module distributed: model = cluster.distribute(model)")
        return self._loop


class Distributed(nn.Module):
    """A module of the user's own that is distributed; has the attributes of that module."""

    module: Any  # the module of the script, with its own attributes

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.module = loop.model.net
        object.__setattr__(self, "_loop", loop)  # not a part of the module

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """What the module gives; while gradients are taken, its own parameters' are summed over trainers."""
        called = self._loop.model.module if torch.is_grad_enabled() else self.module
        return called(*args, **keywords)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

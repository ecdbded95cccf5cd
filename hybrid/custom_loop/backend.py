"""Where the tables of a module lie, and who the other trainers are: what a loop must know of the world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.embedding.placement import Placement
from hybrid.embedding.table_spec import TableSpec
from hybrid.embedding.trainer.lookup import TableSource
from hybrid.engine.update_guard import Decided
from hybrid.protocol.update_rules import UpdateRules
from hybrid.storage.remote_path import StoragePath


@dataclass(frozen=True)
class Deployed:
    """The tables of a module, in place.

    Attributes:
        placement: which worker has which rows.
        rules: how gradients become updates.
        sources: whoever answers for each worker.
        hosted: the same, as those that wait for decisions about a step.
    """

    placement: Placement
    rules: UpdateRules
    sources: Mapping[int, TableSource]
    hosted: Sequence[Decided]


class Host(Protocol):
    """A trainer's world.

    Attributes:
        config: of the run.
        trainer: the index of this one.
        group: of all trainers.
        is_alone: whether this process is all there is.
        snapshot: where to save what there is after ``train.max_steps``, or None.
    """

    config: RunConfig
    trainer: int
    group: dist.ProcessGroup
    is_alone: bool
    snapshot: Path | None

    def deploy(self, tables: Sequence[TableSpec]) -> Deployed:
        """Put tables in place; all trainers call it at once, with the same ones."""
        ...

    def prepare(self) -> str:
        """Where the data of the configuration are, prepared: what :func:`open_split` opens.

        All trainers call it at once.

        Raises:
            ConfigError, DataError: it cannot be.
        """
        ...

    def save(self, folder: StoragePath, step: int, dense: Mapping[str, Tensor]) -> None:
        """Write a checkpoint of the rows, and of the module; all trainers call it at once.

        Args:
            dense: the module, as :func:`pack_dense` has it; that of trainer 0 counts.

        Raises:
            CheckpointError: it cannot be written.
        """
        ...

    def load(self, stored: Checkpoint) -> None:
        """Take the rows of a checkpoint; all trainers call it at once.

        Raises:
            CheckpointError: it has other tables.
        """
        ...


# Of the process in which a script of the user's runs as a trainer; else there is none.
HOST: ContextVar[Host] = ContextVar("host")

"""What a training loop needs from the process it runs in: tables, the other trainers, checkpoints."""

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
from hybrid.config.validation import SCHEDULES_THAT_END
from hybrid.embedding.placement import Placement
from hybrid.embedding.table_spec import TableSpec
from hybrid.embedding.trainer.lookup import TableSource
from hybrid.engine.update_guard import Decided
from hybrid.errors import ConfigError
from hybrid.protocol.learning_rate_schedule import Schedule
from hybrid.protocol.update_rules import UpdateRules
from hybrid.storage.remote_path import StoragePath


@dataclass(frozen=True)
class PlacedTables:
    """The tables of a module, on their workers.

    Attributes:
        placement: which worker holds which rows.
        rules: how gradients become updates.
        sources: by worker, what answers its lookups.
        barriers: the update barrier of each worker.
    """

    placement: Placement
    rules: UpdateRules
    sources: Mapping[int, TableSource]
    barriers: Sequence[Decided]


class Backend(Protocol):
    """What a training loop needs from the process it runs in.

    All trainers call each method together, with the same arguments.

    Attributes:
        config: configuration of the run.
        trainer: rank of this trainer.
        group: process group of all trainers.
        is_single_process: whether there is no cluster.
        snapshot: folder of a checkpoint to write after ``train.max_steps`` steps, or None.
    """

    config: RunConfig
    trainer: int
    group: dist.ProcessGroup
    is_single_process: bool
    snapshot: Path | None

    def place_tables(self, tables: Sequence[TableSpec]) -> PlacedTables:
        """Create the tables on the workers."""
        ...

    def prepare_data(self) -> str:
        """Prepare the data of the configuration, and return what :func:`open_split` opens.

        Raises:
            ConfigError, DataError: the data cannot be prepared.
        """
        ...

    def save(self, folder: StoragePath, step: int, dense: Mapping[str, Tensor]) -> None:
        """Write a checkpoint of the tables and the module.

        Args:
            dense: the module as :func:`pack_dense` returns it; that of trainer 0 is written.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        ...

    def load(self, stored: Checkpoint) -> None:
        """Load the rows of a checkpoint.

        Raises:
            CheckpointError: the checkpoint has other tables.
        """
        ...


# Set in the thread that runs a script on a trainer of a cluster.
BACKEND: ContextVar[Backend] = ContextVar("backend")


def update_rules(config: RunConfig, num_trainers: int) -> UpdateRules:
    """Return how gradients become updates in a custom loop.

    Raises:
        ConfigError: a key does not apply to custom loops.
    """
    if config.train.micro_batches != 1:
        rule = "must be 1 in a custom training loop, whose module takes a batch as a whole"
        raise ConfigError("train.micro_batches", rule, config.train.micro_batches)
    if config.dense.ddp == "inside":
        rule = "must be outside or none in a custom training loop, whose module has no stages"
        raise ConfigError("dense.ddp", rule, "inside")
    section = config.schedule
    if section.call.name in SCHEDULES_THAT_END and not section.steps:
        rule = f'needs its steps, which only the script knows, as in "{section.call.name}(steps = 1000)"'
        raise ConfigError("schedule.kind", rule, section.kind)
    return UpdateRules.of(config, Schedule.of(section, section.steps), num_trainers)

"""Backends of custom training loops: access to the tables, the other trainers, data and checkpoints.

:class:`SingleProcess` is for notebooks and ``python script.py``. The backend of a cluster is in ``workers``.
"""

import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import DENSE_FILE, Manifest, write_text
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config import DenseSection, RunConfig
from hybrid.config.validation import FINITE_SCHEDULES
from hybrid.custom_loop.script_log import ScriptLog
from hybrid.data.dataset.dataset_manifest import checkpoint_contents
from hybrid.data.prepare.preparation import ensure_prepared
from hybrid.embedding.placement import Placement, place
from hybrid.embedding.table_source import TableSource
from hybrid.embedding.table_spec import TableSpec
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.engine.step_engine import GuardedModule
from hybrid.errors import CheckpointError, ConfigError, StorageError
from hybrid.storage.remote_path import StoragePath
from hybrid.updates.update_rules import Schedule, UpdateRules


class WorkerTables(TableSource, GuardedModule, Protocol):
    """The tables of one worker, which look up rows, and scale or drop an update if trainers decide so."""


@dataclass(frozen=True)
class PlacedTables:
    """The tables of a distributed module, and the workers that hold them."""

    module_index: int  # index among the modules that the script has distributed
    placement: Placement  # the worker of each row
    rules: UpdateRules
    workers: Mapping[int, WorkerTables]  # the tables of each worker that holds rows


@dataclass(eq=False)
class Backend:
    """What a training loop needs from the process it runs in.

    All trainers call each method together, except :meth:`warn`. On a cluster, most errors of these methods
    end the run and are not raised in the script.

    Args:
        trainer, group: the rank of this trainer, and the group of all trainers.
        snapshot: for ``hybrid compare``, the checkpoint to write after ``train.max_steps`` steps; else None.

    Attributes:
        texts: the content of text files that each checkpoint gets, by file name.
        logs: one log for each :class:`Cluster` that has called ``log``. They end with the script.
    """

    is_single_process = False

    config: RunConfig
    trainer: int
    group: dist.ProcessGroup
    snapshot: Path | None
    texts: dict[str, str] = field(default_factory=dict, init=False)
    logs: list[ScriptLog] = field(default_factory=list, init=False)

    def warn(self, message: str) -> None:
        """Show a warning about the script. Only trainer 0 calls this method."""
        warnings.warn(message, stacklevel=2)

    def create_tables(self, tables: Sequence[TableSpec]) -> PlacedTables:
        """Create the tables on the workers; :meth:`Cluster.distribute` lists the errors."""
        raise NotImplementedError

    def prepare_data(self) -> str:
        """Convert the data of section [data] to arrays, if not yet done; return their path or URL.

        ConfigError, DataError or StorageError if the data cannot be prepared.
        """
        raise NotImplementedError

    def enable_restart(self, folder: StoragePath) -> None:
        """Let the launcher, if any, restart a failed script from the checkpoints in ``folder``."""

    def save(
        self, module_index: int, folder: StoragePath, manifest: Manifest, dense: Mapping[str, Tensor]
    ) -> None:
        """Write a checkpoint of the distributed module ``module_index`` and its tables.

        Args:
            manifest: the manifest to write; this method adds the list of files.
            dense: states of the module and its optimizers (:func:`pack_dense`). Trainer 0's are written.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        raise NotImplementedError

    def load(self, module_index: int, stored: Checkpoint) -> None:
        """Load the rows of a checkpoint into the tables of the distributed module ``module_index``.

        CheckpointError if the checkpoint is damaged, or has other tables than the module.
        """
        raise NotImplementedError


# The backend that `connect` returns; not set in a plain Python process.
BACKEND: ContextVar[Backend] = ContextVar("backend")


_CONFIGURED = "is for configured runs only; leave it out"


def update_rules(config: RunConfig, num_trainers: int) -> UpdateRules:
    """Check the configuration of a custom loop; return its update mode, clipping, schedule and timeout.

    ConfigError if a key does not apply to custom loops, or a decaying schedule lacks ``schedule.steps``.
    """
    defaults = DenseSection()
    for name in ("ddp", "compile", "autocast", "tensor_size", "remote_mlp"):
        value = getattr(config.dense, name)
        if value != getattr(defaults, name):
            raise ConfigError(f"dense.{name}", _CONFIGURED, value)
    if config.dense.devices:
        raise ConfigError("dense.device", _CONFIGURED, config.dense.device)
    if config.profile.steps:
        raise ConfigError("profile.steps", _CONFIGURED, config.profile.steps)
    section = config.schedule
    if section.call.name in FINITE_SCHEDULES and not section.steps:
        rule = f'needs the number of steps in a custom loop, such as "{section.call.name}(steps = 1000)"'
        raise ConfigError("schedule.kind", rule, section.kind)
    return UpdateRules.of(config, Schedule.of(section, section.steps), num_trainers)


class SingleProcess(Backend):
    """A backend without a cluster: this process holds all tables, and writes and loads checkpoints."""

    is_single_process = True

    def __init__(self, config: RunConfig, snapshot: Path | None = None) -> None:
        group = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]  # without a store: only its size is used
        super().__init__(config, 0, group, snapshot)
        self._shards: list[TableShards] = []  # by index of the module
        self._data: StoragePath | None = None

    def create_tables(self, tables: Sequence[TableSpec]) -> PlacedTables:
        placement = place(tables, num_workers=1)
        rules = update_rules(self.config, num_trainers=1)
        shards = TableShards(placement, 0, rules, getattr(torch, self.config.train.dtype))
        shards.initialize(self.config.run.seed)
        self._shards.append(shards)
        # A thread that updates rows while the interpreter ends would abort the process.
        weakref.finalize(self, shards.close)
        return PlacedTables(len(self._shards) - 1, placement, rules, {0: shards})

    def prepare_data(self) -> str:
        self._data = ensure_prepared(self.config, print).absolute()
        return str(self._data)

    def save(
        self, module_index: int, folder: StoragePath, manifest: Manifest, dense: Mapping[str, Tensor]
    ) -> None:
        partial = checkpoint_folders.begin(folder)
        try:
            self._shards[module_index].begin_save(is_copied=False)
            files = {**self._shards[module_index].write(partial), **write_tensors(partial, DENSE_FILE, dense)}
            texts, vocabularies = checkpoint_contents(self.config, self._data)
            for name, text in {**texts, **self.texts}.items():
                files |= write_text(partial, name, text)
            for name, source in vocabularies.items():
                files |= checkpoint_folders.write_vocabulary(partial, name, source)
            checkpoint_folders.commit(partial, replace(manifest, files=files))
        except BaseException as error:
            checkpoint_folders.discard(partial)
            if isinstance(error, StorageError):
                raise CheckpointError(str(error)) from error
            raise

    def load(self, module_index: int, stored: Checkpoint) -> None:
        self._shards[module_index].load(stored.folder, stored.manifest.step)

"""A script of the user's own on a trainer: it runs in a thread, and asks the master for what it wants.

::

    master                               trainer
    ──────                               ───────
    creates a Script, has it start ────► runs the user's file
    asks for its next request      ────►
                                   ◄──── cluster.distribute(module): these tables
    makes them on the workers      ────► their stubs
                                         trains, with the workers
                                   ◄──── has ended, or an exception

The thread is the trainer's own, and ends with the process.
"""

import runpy
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor

from hybrid.checkpoint.checkpoint_files import DENSE_FILE, Files
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config import RunConfig
from hybrid.config.loading import with_own
from hybrid.custom_loop.backend import BACKEND, PlacedTables
from hybrid.embedding.placement import Placement
from hybrid.embedding.table_spec import TableSpec
from hybrid.errors import ClusterError, ConfigError, HybridError
from hybrid.protocol.update_rules import UpdateRules
from hybrid.storage.remote_path import StoragePath
from hybrid.transport import RemoteTables

# To fill, write and read whole tables.
_ANSWER_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class TablesWanted:
    """The tables of a module that a script has had distributed."""

    tables: tuple[TableSpec, ...]


@dataclass(frozen=True, slots=True)
class TablesPlaced:
    """What a trainer must know of tables on the workers.

    Attributes:
        remote_tables: a stub for every worker that holds rows.
    """

    placement: Placement
    rules: UpdateRules
    remote_tables: dict[int, RemoteTables]


@dataclass(frozen=True, slots=True)
class SaveWanted:
    """A checkpoint of the step that a script has come to."""

    folder: StoragePath
    step: int


@dataclass(frozen=True, slots=True)
class LoadWanted:
    """The rows of a checkpoint."""

    folder: StoragePath
    step: int


@dataclass(frozen=True, slots=True)
class DataWanted:
    """The data of the configuration, prepared."""


@dataclass(frozen=True, slots=True)
class DataPrepared:
    """Where it is, for all hosts; see :func:`hybrid.data.prepare.dataset_location.open_split`."""

    source: str


@dataclass(frozen=True, slots=True)
class Done:
    """What was asked for is done."""


@dataclass(frozen=True, slots=True)
class ScriptEnded:
    """The script has come to its end."""


Wanted: TypeAlias = TablesWanted | SaveWanted | LoadWanted | DataWanted
Request: TypeAlias = Wanted | ScriptEnded
Answer: TypeAlias = TablesPlaced | DataPrepared | Done


class ScriptExitError(HybridError):
    """The script has called ``sys.exit`` with a status that is not zero."""


class Script:
    """Lives on a trainer process; the master creates it there and calls its public methods.

    Args:
        index: this trainer's index.
        config: of the run.
        path: of the script.
        arguments: that it finds in ``sys.argv``.
        snapshot: see :class:`hybrid.custom_loop.backend.Backend`.
        settings: what this role was given of its own.
    """

    def __init__(
        self,
        index: int,
        config: RunConfig,
        path: str,
        arguments: Sequence[str],
        snapshot: Path | None,
        settings: Sequence[str] = (),
    ) -> None:
        if not Path(path).is_file():
            where = f"on host {socket.gethostname()}; it must be there on those of all trainers"
            raise ConfigError("SCRIPT", f"is not a file {where}", path)
        self._path = path
        self._arguments = arguments
        self._requests: SimpleQueue[Request | Exception] = SimpleQueue()
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._host = _ClusterHost(with_own(config, settings), index, self._ask, snapshot)

    def start(self) -> None:
        """Run it, in a thread of its own."""
        threading.Thread(target=self._run, name="script", daemon=True).start()

    def next_request(self, seconds: float) -> Request | None:
        """What it asks for next; None if that is nothing for so long.

        Raises:
            Exception: that it has raised.
        """
        try:
            request = self._requests.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(request, Exception):
            raise request
        return request

    def answer(self, answer: Answer) -> None:
        """Let it have what it has asked for."""
        self._answers.put(answer)

    def write(self, folder: StoragePath) -> Files:
        """Write the module of the step that it wants saved into a checkpoint folder."""
        return write_tensors(folder, DENSE_FILE, self._host.dense)

    def _ask(self, wanted: Wanted) -> Answer:
        self._requests.put(wanted)
        try:
            return self._answers.get(timeout=_ANSWER_SECONDS)
        except Empty:
            raise ClusterError(f"the master did not answer for {_ANSWER_SECONDS:g} s") from None

    def _run(self) -> None:
        BACKEND.set(self._host)  # in this thread's context
        try:
            run_script(self._path, self._arguments)
        except Exception as error:  # the master's to know
            self._requests.put(error)
            return
        self._requests.put(ScriptEnded())


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a file as Python runs a program; what it imports may lie beside it.

    Raises:
        ScriptExitError: it has ended with another status than zero.
    """
    sys.argv = [path, *arguments]
    sys.path.append(str(Path(path).resolve().parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as exited:
        if exited.code not in (None, 0):
            raise ScriptExitError(f"{path} has ended with sys.exit({exited.code!r})") from None


class _ClusterHost:
    """A trainer's world; see :class:`hybrid.custom_loop.backend.Backend`."""

    is_single_process = False

    def __init__(
        self, config: RunConfig, trainer: int, ask: Callable[[Wanted], Answer], snapshot: Path | None
    ) -> None:
        assert dist.group.WORLD is not None, "joining the cluster forms the trainers' process group"
        self.config = config
        self.trainer = trainer
        self.group = dist.group.WORLD
        self.snapshot = snapshot
        self._ask = ask
        self.dense: Mapping[str, Tensor] = {}  # of the step that is being saved

    def place_tables(self, tables: Sequence[TableSpec]) -> PlacedTables:
        """Have the master make the tables."""
        placed = self._ask(TablesWanted(tuple(tables)))
        assert isinstance(placed, TablesPlaced)
        stubs = placed.remote_tables
        return PlacedTables(placed.placement, placed.rules, stubs, list(stubs.values()))

    def prepare_data(self) -> str:
        """Have the master prepare it."""
        prepared = self._ask(DataWanted())
        assert isinstance(prepared, DataPrepared)
        return prepared.source

    def save(self, folder: StoragePath, step: int, dense: Mapping[str, Tensor]) -> None:
        """Have the master see it written."""
        self.dense = dense
        self._ask(SaveWanted(folder.absolute(), step))
        self.dense = {}

    def load(self, stored: Checkpoint) -> None:
        """Have the master see it read."""
        self._ask(LoadWanted(stored.folder.absolute(), stored.manifest.step))

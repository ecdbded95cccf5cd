"""A script of the user on a trainer: it runs in a thread and sends requests to the master.

::

    master                               trainer
    ──────                               ───────
    creates a Script, starts it    ────► runs the user's file
    fetches the next request       ────►
                                   ◄──── cluster.distribute(module): deploy these tables
    creates them on the workers    ────► their stubs
                                         trains, with the workers
                                   ◄──── end, or an exception

The thread ends with the process of the trainer.
"""

import runpy
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TextIO, TypeAlias

import torch.distributed as dist
from torch import Tensor

from hybrid.checkpoint.checkpoint_manifest import DENSE_FILE, Files
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config import RunConfig
from hybrid.config.loading import with_own
from hybrid.custom_loop.backend import BACKEND, PlacedTables
from hybrid.custom_loop.loop_warnings import LoopWarning
from hybrid.embedding.placement import Placement
from hybrid.embedding.table_spec import TableSpec
from hybrid.errors import ClusterError, ConfigError, HybridError
from hybrid.protocol.update_rules import UpdateRules
from hybrid.storage.remote_path import StoragePath
from hybrid.transport import RemoteTables
from workers.console.messages import print_line

# To fill, write and read whole tables.
_RESPONSE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class ScriptRequest:
    """A request of a script to the master; all scripts make the same one.

    Attributes:
        action: "deploy" tables, "prepare" the data of the configuration, "save" or "load" a checkpoint, or
            "end" of the script.
        tables: to deploy.
        folder, step: of the checkpoint.
    """

    action: str
    tables: tuple[TableSpec, ...] = ()
    folder: StoragePath | None = None
    step: int = 0

    def __str__(self) -> str:
        where = "" if self.folder is None else f" step {self.step} in {self.folder}"
        return f"{self.action}{where}"


@dataclass(frozen=True, slots=True)
class DeployedTables:
    """The response to "deploy".

    Attributes:
        remote_tables: a stub for every worker that holds rows.
    """

    placement: Placement
    rules: UpdateRules
    remote_tables: dict[int, RemoteTables]


# Text is the source of the prepared data; see open_split.
ScriptResponse: TypeAlias = DeployedTables | str | None


class ScriptExitError(HybridError):
    """The script has called ``sys.exit`` with a status that is not zero."""


class Script:
    """Lives on a trainer process; the master creates it there and calls its public methods.

    Args:
        index: this trainer's index.
        config: of the run.
        path: of the script.
        arguments: of the script, for ``sys.argv``.
        snapshot: see :class:`hybrid.custom_loop.backend.Backend`.
        settings: this role's values of keys marked "by host".
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
            rule = f"is not a file on host {socket.gethostname()}; it must exist on the hosts of all trainers"
            raise ConfigError("SCRIPT", rule, path)
        self._path = path
        self._arguments = arguments
        self._requests: SimpleQueue[ScriptRequest | Exception] = SimpleQueue()
        self._responses: SimpleQueue[ScriptResponse] = SimpleQueue()
        self._backend = _ClusterBackend(with_own(config, settings), index, self._send_request, snapshot)

    def start(self) -> None:
        """Run the script in its own thread."""
        threading.Thread(target=self._run, name="script", daemon=True).start()

    def next_request(self, seconds: float) -> ScriptRequest | None:
        """Return the next request, or None after the timeout.

        Raises:
            Exception: an exception of the script.
        """
        try:
            request = self._requests.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(request, Exception):
            raise request
        return request

    def respond(self, response: ScriptResponse) -> None:
        """Let the script continue with the response to its request."""
        self._responses.put(response)

    def write(self, folder: StoragePath) -> Files:
        """Write the module into a checkpoint folder, as of the step that the script saves."""
        return write_tensors(folder, DENSE_FILE, self._backend.dense)

    def _send_request(self, request: ScriptRequest) -> ScriptResponse:
        self._requests.put(request)
        try:
            return self._responses.get(timeout=_RESPONSE_SECONDS)
        except Empty:
            raise ClusterError(f"the master did not respond for {_RESPONSE_SECONDS:g} s") from None

    def _run(self) -> None:
        BACKEND.set(self._backend)  # in this thread's context
        warnings.showwarning = _show_warning
        try:
            run_script(self._path, self._arguments)
        except Exception as error:  # raised on the master
            self._requests.put(error)
            return
        self._requests.put(ScriptRequest("end"))


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print warnings about the loop on stdout, the screen; write others to stderr, the log of the role."""
    if issubclass(category, LoopWarning):
        print_line(f"warning: {message}")
    else:
        (file or sys.stderr).write(warnings.formatwarning(message, category, filename, lineno, line))


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a file as Python runs a program; it can import modules beside it.

    Raises:
        ScriptExitError: it has ended with a status that is not zero.
    """
    sys.argv = [path, *arguments]
    sys.path.append(str(Path(path).resolve().parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as exited:
        if exited.code not in (None, 0):
            raise ScriptExitError(f"{path} has ended with sys.exit({exited.code!r})") from None


class _ClusterBackend:
    """The backend of a trainer on a cluster; see :class:`hybrid.custom_loop.backend.Backend`."""

    is_single_process = False

    def __init__(
        self,
        config: RunConfig,
        trainer: int,
        request: Callable[[ScriptRequest], ScriptResponse],
        snapshot: Path | None,
    ) -> None:
        assert dist.group.WORLD is not None, "joining the cluster forms the trainers' process group"
        self.config = config
        self.trainer = trainer
        self.group = dist.group.WORLD
        self.snapshot = snapshot
        self._request = request
        self.dense: Mapping[str, Tensor] = {}  # of the step that is being saved

    def place_tables(self, tables: Sequence[TableSpec]) -> PlacedTables:
        """Make the master create the tables on the workers."""
        deployed = self._request(ScriptRequest("deploy", tables=tuple(tables)))
        assert isinstance(deployed, DeployedTables)
        stubs = deployed.remote_tables
        return PlacedTables(deployed.placement, deployed.rules, stubs, list(stubs.values()))

    def prepare_data(self) -> str:
        """Make the master prepare the data; return their source."""
        source = self._request(ScriptRequest("prepare"))
        assert isinstance(source, str)
        return source

    def save(self, folder: StoragePath, step: int, dense: Mapping[str, Tensor]) -> None:
        """Make the master write a checkpoint."""
        self.dense = dense
        self._request(ScriptRequest("save", folder=folder.absolute(), step=step))
        self.dense = {}

    def load(self, stored: Checkpoint) -> None:
        """Make the master load a checkpoint."""
        step = stored.manifest.step
        self._request(ScriptRequest("load", folder=stored.folder.absolute(), step=step))

"""The job that runs a script of the user on every trainer.

::

    master: ScriptJob                    trainer: Script
    ─────────────────                    ───────────────
    creates the scripts, starts    ────► runs the user's file in a thread
    fetches the next request       ────►
                                   ◄──── cluster.distribute(module): deploy these tables
    creates them on the workers    ────► their stubs
                                         trains, with the workers
                                   ◄──── end, or an exception

The script runs in a daemon thread, which does not keep the process of a stopped trainer alive.
"""

import os
import runpy
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from hybrid import transport
from hybrid.checkpoint.checkpoint_folders import DENSE_FILE, Files, Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.config import RunConfig
from hybrid.config.loading import apply_settings
from hybrid.custom_loop.backend import BACKEND, Backend, PlacedTables, update_rules
from hybrid.data.dataset.dataset_manifest import checkpoint_contents
from hybrid.embedding.placement import place
from hybrid.embedding.table_spec import TableSpec
from hybrid.errors import CheckpointError, ConfigError, HybridError, StorageError, error_class, error_kind
from hybrid.primitives.thread_counts import use_configured_threads
from hybrid.storage.remote_path import StoragePath
from hybrid.topology import Topology
from hybrid.updates.hosted_module import HostedModule
from hybrid.user_code.user_modules import FolderFinder
from workers.cluster_task import ScriptTask
from workers.console import TerminalView, print_line
from workers.controller.deployment import BULK_TIMEOUT_SECONDS, HeldCheckpoint, deploy_tables
from workers.exit_codes import ExitCode
from workers.run_folder.run_access import RESULT_FILE, record_script_checkpoints, run_write_errors

_POLL_SECONDS = 1.0
_DOING = "in your script"


class ScriptRequest(NamedTuple):
    """A request of a script to the master; the scripts of all trainers make the same requests."""

    # "deploy" tables; "prepare" the data of the configuration; "resume" from a folder after failures; "save"
    # or "load" a checkpoint; "end" of the script.
    action: str
    arguments: tuple[Any, ...] = ()  # the folder of a checkpoint is the first argument


class ScriptJob:
    """A job that runs a script, at the same path on the hosts of all trainers, and handles its requests."""

    def __init__(self, config: RunConfig, task: ScriptTask) -> None:
        self.doing = _DOING
        self._config = config
        self._task = task
        self._tables: list[list[transport.RemoteTables]] = []  # of each module
        self._data: StoragePath | None = None

    def run(self, topology: Topology, data: Callable[[], StoragePath], view: TerminalView) -> ExitCode:
        """Run the script to its end on every trainer; ``data`` prepares the data of the configuration."""
        view.close()  # trainer 0 prints
        task = self._task
        shared = (self._config, replace(task, path=os.path.abspath(task.path)))
        bulk = BULK_TIMEOUT_SECONDS
        created = [
            transport.create(role, Script, role.index, *shared, timeout_seconds=bulk)
            for role in topology.trainers
        ]
        scripts = transport.gather(created)
        transport.gather([script.call(Script.start) for script in scripts])
        while (request := self._next_request(scripts)).action != "end":
            response: Any = None
            match request.action, request.arguments:
                case "deploy", tables:
                    placement = place(tables, topology.num_workers)
                    rules = update_rules(self._config, topology.num_trainers)
                    workers, _ = deploy_tables(topology, self._config, placement, rules)
                    response = PlacedTables(len(self._tables), placement, rules, workers)
                    self._tables.append([*workers.values()])
                case "prepare", _:
                    self._data = data()
                    response = str(self._data.absolute())
                case "save", arguments:
                    response = self._save(scripts[0], *arguments)
                case "resume", (folder,) if task.scratch is not None:
                    record_script_checkpoints(task.scratch, folder)
                case "load", (folder, manifest, module_index):
                    source = HostedModule.load, folder, manifest.step
                    loads = [t.call(*source, timeout_seconds=bulk) for t in self._tables[module_index]]
                    transport.gather(loads)
            transport.gather([script.call(Script.respond, response) for script in scripts])
        if task.scratch is not None:
            with run_write_errors(task.scratch):
                (task.scratch / RESULT_FILE).touch()
        transport.gather([each.call(HostedModule.close) for tables in self._tables for each in tables])
        return ExitCode.DONE

    def _next_request(self, scripts: Sequence["transport.Remote[Script]"]) -> ScriptRequest:
        """Wait for the next request of all scripts; HybridError if two scripts make different requests."""
        timeout_seconds = _POLL_SECONDS + self._config.cluster.timeout_seconds
        requests: dict[int, ScriptRequest] = {}
        while len(requests) < len(scripts):
            calls = {
                i: s.call(Script.next_request, _POLL_SECONDS, timeout_seconds=timeout_seconds)
                for i, s in enumerate(scripts)
                if i not in requests
            }
            received = transport.gather(list(calls.values()))
            requests |= {i: each for i, each in zip(calls, received, strict=True) if each is not None}
            for trainer, request in requests.items():
                self.doing = f"{_DOING}; trainer {trainer} was already at its {request.action}"
                first_trainer, first = next(iter(requests.items()))
                if repr(request) == repr(first):  # NaN equals NaN
                    continue
                rule = f"make different requests: {first.action}, and {request.action}"
                if request.action == first.action == "deploy":
                    rule = "distribute different tables: every trainer must build the same module"
                elif request.action == first.action and request.arguments[0] != first.arguments[0]:
                    folders = f"{first.arguments[0]}, and {request.arguments[0]}"
                    rule = f"{request.action} different folders: {folders}"
                elif request.action == first.action == "save":
                    rule = "save different states: optimizers, schedulers and other objects must be alike"
                raise HybridError(f"the scripts of trainers {first_trainer} and {trainer} {rule}")
        self.doing = _DOING
        return requests[0]

    def _save(
        self,
        dense_writer: "transport.Remote[Script]",
        folder: StoragePath,
        manifest: Manifest,
        module_index: int,
        texts: Mapping[str, str],
    ) -> tuple[str, str] | None:
        """Save the script's module ``module_index``; return an error's kind and message, or None."""
        tables, bulk = self._tables[module_index], BULK_TIMEOUT_SECONDS
        transport.gather([each.call(HostedModule.begin_save, False, timeout_seconds=bulk) for each in tables])

        def start(partial: StoragePath) -> list[transport.Pending[Files]]:
            dense = dense_writer.call(Script.write, partial, timeout_seconds=bulk)
            return [dense, *(each.call(HostedModule.write, partial, timeout_seconds=bulk) for each in tables)]

        of_config, vocabularies = checkpoint_contents(self._config, self._data)
        try:
            HeldCheckpoint(folder, manifest, {**of_config, **texts}, {}, start, False, vocabularies).write()
        except (CheckpointError, StorageError) as error:
            return error_kind(error), str(error)
        return None


class Script(Backend):
    """A script in a trainer process. The script sends requests to the master, such as to create tables.

    The master creates the object, and calls ``start``, ``next_request``, ``respond`` and ``write``. The
    thread of the script calls the methods of :class:`Backend`.

    Args:
        task: the script, with its absolute path.
        settings: this role's values of the configuration keys that may differ between hosts.
    """

    def __init__(self, index: int, config: RunConfig, task: ScriptTask, settings: Sequence[str] = ()) -> None:
        if not os.path.isfile(task.path):
            rule = f"is not a file on host {socket.gethostname()}; it must exist on the hosts of all trainers"
            raise ConfigError("SCRIPT", rule, task.path)
        assert dist.group.WORLD is not None, "joining the cluster forms the trainers' process group"
        super().__init__(apply_settings(config, settings), index, dist.group.WORLD, task.snapshot)
        self._task = task
        self._requests: SimpleQueue[ScriptRequest | Exception] = SimpleQueue()
        self._responses = SimpleQueue[Any]()
        self._dense: Mapping[str, Tensor] = {}

    def start(self) -> None:
        """Run the script in a new thread."""
        threading.Thread(target=self._run, name="script", daemon=True).start()

    def next_request(self, seconds: float) -> ScriptRequest | None:
        """Return the next request, or None after ``seconds``; if the script failed, raise its exception."""
        try:
            request = self._requests.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(request, Exception):
            raise request
        return request

    def respond(self, response: Any) -> None:
        """Let the script continue with the response to its request."""
        self._responses.put(response)

    def write(self, folder: StoragePath) -> Files:
        """Write the module into a checkpoint folder, from the tensors that :meth:`save` has received."""
        return write_tensors(folder, DENSE_FILE, self._dense)

    def _run(self) -> None:
        use_configured_threads()
        BACKEND.set(self)  # in this thread's context
        try:
            try:
                run_script(self._task.path, self._task.arguments)
            finally:
                for log in self.logs:
                    log.finish()
            self._requests.put(ScriptRequest("end"))
        except Exception as error:  # next_request raises it, so the master receives it
            self._requests.put(error)
        except BaseException as error:  # such as asyncio.CancelledError
            self._requests.put(HybridError(f"{self._task.path} has ended with {error!r}"))

    def _send(self, action: str, *arguments: Any) -> Any:
        """Send a request, and wait for the response; if the master is lost, this process ends."""
        self._requests.put(ScriptRequest(action, arguments))
        return self._responses.get()

    def warn(self, message: str) -> None:
        print_line(f"warning: {message}")  # stderr is the log of the role

    def create_tables(self, tables: Sequence[TableSpec]) -> PlacedTables:
        placed: PlacedTables = self._send("deploy", *tables)
        return placed

    def prepare_data(self) -> str:
        return str(self._send("prepare"))

    def enable_restart(self, folder: StoragePath) -> None:
        self._send("resume", folder.absolute())

    def save(
        self, module_index: int, folder: StoragePath, manifest: Manifest, dense: Mapping[str, Tensor]
    ) -> None:
        self._dense = dense
        error = self._send("save", folder.absolute(), manifest, module_index, self.texts)
        self._dense = {}
        if error is not None:
            kind, message = error
            raise CheckpointError(message) from error_class(kind)(message)

    def load(self, module_index: int, stored: Checkpoint) -> None:
        self._send("load", stored.folder.absolute(), stored.manifest, module_index)


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a Python file as a program, with imports from its folder and the working directory.

    ``sys.argv`` and the import path stay changed. HybridError if the file calls ``sys.exit`` with an error.
    """
    sys.argv = [path, *arguments]
    sys.path.append(str(Path(path).resolve().parent))
    FolderFinder.search(Path())
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as exited:
        if exited.code not in (None, 0):
            raise HybridError(f"{path} has ended with sys.exit({exited.code!r})") from None

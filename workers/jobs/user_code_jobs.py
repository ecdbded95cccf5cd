"""Jobs that run user code: a script on every trainer, or a function on the master."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hybrid import transport
from hybrid.checkpoint.checkpoint_manifest import Files, Manifest
from hybrid.config import RunConfig
from hybrid.config.loading import CONFIG_FILE
from hybrid.custom_loop.backend import update_rules
from hybrid.data.prepare.dataset_location import source_of
from hybrid.embedding.placement import Placement, place
from hybrid.errors import HybridError
from hybrid.server.hosted_module import Hosted
from hybrid.storage.remote_path import StoragePath
from hybrid.topology import Topology
from hybrid.user_code.function_names import load_function
from hybrid.user_code.run_signature import signed_toml
from workers.console.terminal import TerminalView
from workers.controller.deployment import BULK_TIMEOUT_SECONDS, Saving, deploy_tables
from workers.controller.shared_folders import SharedFolders
from workers.controller.trainer_script import DeployedTables, Script, ScriptRequest, ScriptResponse
from workers.exit_codes import ExitCode

_POLL_SECONDS = 1.0


class FunctionJob:
    """Calls ``function(topology, config)`` in the master's process."""

    doing = "in your function"

    def __init__(self, config: RunConfig, function: str) -> None:
        self._config = config
        self._function = load_function("FUNCTION", function, ("topology", "config"))

    def run(
        self, topology: Topology, data: Callable[[], Path], view: TerminalView, folders: SharedFolders
    ) -> ExitCode:
        """Call the function; the run ends when it returns."""
        view.close()
        self._function(topology, self._config)
        return ExitCode.DONE


class ScriptJob:
    """Runs a script on all trainers, and handles its requests.

    Args:
        path: of the script, as every trainer sees it.
        arguments: of the script.
        snapshot: where to save the state after ``train.max_steps``, or None.
    """

    def __init__(
        self, config: RunConfig, path: str, arguments: Sequence[str], snapshot: Path | None = None
    ) -> None:
        self.doing = "in your script"
        self._config = config
        self._path = path
        self._arguments = arguments
        self._snapshot = snapshot
        self._tables: dict[int, transport.RemoteTables] = {}
        self._placement: Placement

    def run(
        self, topology: Topology, data: Callable[[], Path], view: TerminalView, folders: SharedFolders
    ) -> ExitCode:
        """Run the script to its end on every trainer."""
        view.close()  # trainer 0 prints
        what = (self._config, os.path.abspath(self._path), self._arguments, self._snapshot)
        created = [
            transport.create(role, Script, role.index, *what, timeout_seconds=BULK_TIMEOUT_SECONDS)
            for role in topology.trainers
        ]
        scripts = transport.gather(created)
        transport.gather([script.call(Script.start) for script in scripts])
        while (request := _next_request(scripts)).action != "end":
            response: ScriptResponse = None
            if request.action == "deploy":
                self._placement = place(request.tables, topology.num_workers)
                rules = update_rules(self._config, topology.num_trainers)
                self._tables = deploy_tables(topology, self._config, self._placement, rules)
                response = DeployedTables(self._placement, rules, self._tables)
            elif request.action == "prepare":
                folder = data()
                folders.check_data(folder)
                response = source_of(folder)
            elif request.action == "save":
                self._save(request, scripts[0])
            else:
                assert request.folder is not None
                where, bulk = (request.folder, request.step), BULK_TIMEOUT_SECONDS
                tables = self._tables.values()
                transport.gather([t.call(Hosted.load, *where, timeout_seconds=bulk) for t in tables])
            transport.gather([script.call(Script.respond, response) for script in scripts])
        transport.gather([tables.call(Hosted.close) for tables in self._tables.values()])
        return ExitCode.DONE

    def _save(self, request: ScriptRequest, first: transport.Remote[Script]) -> None:
        """Make every worker write its rows, and trainer 0 the module."""
        tables, bulk = list(self._tables.values()), BULK_TIMEOUT_SECONDS
        transport.gather([each.call(Hosted.begin_save, False, timeout_seconds=bulk) for each in tables])

        def start(partial: StoragePath) -> list[transport.Pending[Files]]:
            dense = first.call(Script.write, partial, timeout_seconds=bulk)
            return [dense, *(each.call(Hosted.write, partial, timeout_seconds=bulk) for each in tables)]

        assert request.folder is not None
        manifest = Manifest(request.step, 0, self._placement.shapes)
        texts = {CONFIG_FILE: signed_toml(self._config)}
        Saving(request.folder, manifest, texts, {}, start, is_copied=False).write()


def _next_request(scripts: Sequence[transport.Remote[Script]]) -> ScriptRequest:
    """Wait for the next request, which all scripts must make.

    Raises:
        HybridError: two scripts make different requests.
    """
    requests: dict[int, ScriptRequest] = {}
    while len(requests) < len(scripts):
        calls = {
            i: s.call(Script.next_request, _POLL_SECONDS) for i, s in enumerate(scripts) if i not in requests
        }
        received = transport.gather(list(calls.values()))
        requests |= {i: request for i, request in zip(calls, received, strict=True) if request is not None}
        first_trainer, first = next(iter(requests.items()), (0, None))
        for trainer, request in requests.items():
            if first is None or request == first:
                continue
            if request.action == first.action == "deploy":
                what = "distribute modules with different tables: every trainer must build the same module"
            else:
                what = f"make different requests: {first}, and {request}"
            raise HybridError(f"the scripts of trainers {first_trainer} and {trainer} {what}")
    return requests[0]

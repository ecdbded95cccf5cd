"""A script of the user's own on every trainer, and the master as its servant."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hybrid import transport
from hybrid.checkpoint.checkpoint_files import Files
from hybrid.checkpoint.checkpoint_manifest import Manifest
from hybrid.config import RunConfig
from hybrid.config.loading import CONFIG_FILE
from hybrid.custom_loop.backend import update_rules
from hybrid.data.prepare.dataset_location import source_of
from hybrid.embedding.placement import Placement, place
from hybrid.embedding.table_spec import TableSpec
from hybrid.errors import HybridError
from hybrid.server.hosted_module import Hosted
from hybrid.storage.remote_path import StoragePath
from hybrid.topology import Topology
from hybrid.user_code.run_signature import signed_toml
from workers.console.terminal import TerminalView
from workers.controller.deployment import BULK_TIMEOUT_SECONDS, deploy_tables, table_holders
from workers.controller.distributed_checkpoint import Saving
from workers.controller.memory_check import check_memory
from workers.controller.shared_folders import Reach
from workers.controller.trainer_script import (
    Answer,
    DataPrepared,
    DataWanted,
    Done,
    LoadWanted,
    Request,
    SaveWanted,
    Script,
    ScriptEnded,
    TablesPlaced,
    TablesWanted,
)
from workers.exit_codes import ExitCode

_POLL_SECONDS = 1.0


class ScriptJob:
    """Runs a file of the user's on all trainers.

    Args:
        path: of the file, as every trainer sees it.
        arguments: that it is started with.
        snapshot: see :class:`hybrid.custom_loop.backend.Host`.
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

    def run(self, topology: Topology, data: Callable[[], Path], view: TerminalView, reach: Reach) -> ExitCode:
        """Run it to its end on every trainer."""
        view.close()  # the screen is the script's, on trainer 0
        what = (self._config, os.path.abspath(self._path), self._arguments, self._snapshot)
        created = [
            transport.create(role, Script, role.index, *what, timeout_seconds=BULK_TIMEOUT_SECONDS)
            for role in topology.trainers
        ]
        scripts = transport.gather(created)
        transport.gather([script.call(Script.start) for script in scripts])
        while not isinstance(wanted := _agreed(scripts), ScriptEnded):
            answer: Answer = Done()
            if isinstance(wanted, TablesWanted):
                answer = self._deploy(topology, wanted.tables)
            elif isinstance(wanted, DataWanted):
                folder = data()
                reach.check_data(folder)
                answer = DataPrepared(source_of(folder))
            elif isinstance(wanted, SaveWanted):
                self._save(wanted, scripts[0])
            else:
                self._load(wanted)
            transport.gather([script.call(Script.answer, answer) for script in scripts])
        transport.gather([tables.call(Hosted.close) for tables in self._tables.values()])
        return ExitCode.DONE

    def _deploy(self, topology: Topology, tables: Sequence[TableSpec]) -> TablesPlaced:
        self._placement = placement = place(tables, topology.num_workers)
        check_memory(placement, table_holders(topology, placement))
        rules = update_rules(self._config, topology.num_trainers)
        self._tables = deploy_tables(topology, self._config, placement, rules)
        return TablesPlaced(placement, rules, self._tables)

    def _save(self, wanted: SaveWanted, first: transport.Remote[Script]) -> None:
        """Have every worker write its rows, and trainer 0 the module."""
        tables, bulk = list(self._tables.values()), BULK_TIMEOUT_SECONDS
        transport.gather([each.call(Hosted.begin_save, False, timeout_seconds=bulk) for each in tables])

        def start(partial: StoragePath) -> list[transport.Pending[Files]]:
            own = first.call(Script.write, partial, timeout_seconds=bulk)
            return [own, *(each.call(Hosted.write, partial, timeout_seconds=bulk) for each in tables)]

        manifest = Manifest(wanted.step, 0, self._placement.shapes)
        texts = {CONFIG_FILE: signed_toml(self._config)}
        Saving(wanted.folder, manifest, texts, {}, start, is_copied=False).write()

    def _load(self, wanted: LoadWanted) -> None:
        tables = self._tables.values()
        bulk = BULK_TIMEOUT_SECONDS
        transport.gather(
            [t.call(Hosted.load, wanted.folder, wanted.step, timeout_seconds=bulk) for t in tables]
        )


def _agreed(scripts: Sequence[transport.Remote[Script]]) -> Request:
    """What all scripts ask for next; they may come to it at any time.

    Raises:
        HybridError: they ask for different things.
    """
    requests: dict[int, Request] = {}
    while len(requests) < len(scripts):
        asked = {
            i: s.call(Script.next_request, _POLL_SECONDS) for i, s in enumerate(scripts) if i not in requests
        }
        found = transport.gather(list(asked.values()))
        requests |= {i: request for i, request in zip(asked, found, strict=True) if request is not None}
        _refuse_different(requests)
    return requests[0]


def _refuse_different(requests: dict[int, Request]) -> None:
    for trainer, request in requests.items():
        first_trainer, first = next(iter(requests.items()))
        if request == first:
            continue
        if isinstance(request, TablesWanted) and isinstance(first, TablesWanted):
            what = "have distributed modules with different tables: every trainer must build the same one"
        else:
            what = f"do different things: {_words(first)}, and {_words(request)}"
        raise HybridError(f"the scripts of trainers {first_trainer} and {trainer} {what}")


def _words(request: Request) -> str:
    match request:
        case TablesWanted():
            return "one wants a module distributed"
        case SaveWanted(folder, step):
            return f"one wants step {step} saved as {folder}"
        case DataWanted():
            return "one wants the data prepared"
        case LoadWanted(folder):
            return f"one wants {folder} loaded"
        case _:
            return "one has ended"

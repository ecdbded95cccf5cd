"""A function of the user's own as what the master does."""

from collections.abc import Callable
from pathlib import Path

from hybrid.config import RunConfig
from hybrid.topology import Topology
from hybrid.user_code.function_names import load_function
from workers.console.terminal import TerminalView
from workers.controller.shared_folders import Reach
from workers.exit_codes import ExitCode


class FunctionJob:
    """Calls ``function(topology, config)`` in the master's process, once the cluster is there."""

    doing = "in your function"

    def __init__(self, config: RunConfig, function: str) -> None:
        self._config = config
        self._function = load_function("FUNCTION", function, ("topology", "config"))

    def run(self, topology: Topology, data: Callable[[], Path], view: TerminalView, reach: Reach) -> ExitCode:
        """Call it; the run ends when it returns."""
        view.close()
        self._function(topology, self._config)
        return ExitCode.DONE

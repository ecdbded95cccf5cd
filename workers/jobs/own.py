"""A function of the user's own as what the master does."""

from collections.abc import Callable
from pathlib import Path

from hybrid.config import RunConfig
from hybrid.own_code.names import load_function
from hybrid.topology import Topology
from workers.endings import ExitCode
from workers.screen.terminal import TerminalView
from workers.session.reach import Reach


class OwnJob:
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

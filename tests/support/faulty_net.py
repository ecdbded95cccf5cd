"""A net that harms the roles of its own run, one after the other, at the moments that its faults name.

A run names it as ``dense.net = "support.faulty_net:build"`` and has the faults in its folder. Trainer 0 does
it all: itself it raises, to the others it sends signals, and support/faulty_roles.py has some of these raise.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.faults import ERRORS, FAULTS_FILE, RAISING, STARVED, STRUCK_FILE, WORDS, read_times
from support.memory_group import starve
from torch import Tensor, nn
from torch.distributed import rpc

from hybrid.config import RunConfig
from hybrid.input_spec import InputSpec
from hybrid.models.dense_net import Concatenation, DenseNet

_ME = "trainer 0"
_STEPS_BEFORE = 2
_NOTICED_SECONDS = 60.0


class Faults:
    """The fault that is next, if it is this process that is to bring it about.

    Args:
        run: its folder, in which the file of what is done counts over restarts.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._next: tuple[str, str, str] | None = None
        faults = json.loads((run / FAULTS_FILE).read_text())
        done = len(read_times(run, STRUCK_FILE))
        if self._pid(_ME) == os.getpid() and done < len(faults):
            self._next = tuple(faults[done])

    def reach(self, phase: str) -> None:
        """Do what is to be done now, if that is so."""
        if self._next is None or self._next[2] != phase:
            return
        role, action, _ = self._next
        self._next = None
        pid = self._pid(role)
        with (self._run / STRUCK_FILE).open("a") as out:
            out.write(f"{time.time()}\n")
        if action in ERRORS and role == _ME:
            raise ERRORS[action](WORDS)
        if action == STARVED:
            starve(pid)
        else:
            os.kill(pid, RAISING.get(action) or signal.Signals[action])
        if action != "SIGKILL":  # the run could leave the phase before anybody notices
            threading.Event().wait(_NOTICED_SECONDS)

    def _pid(self, role: str) -> int:
        log = (self._run / f"logs/{role.replace(' ', '-')}.log").resolve()
        return next(pid for pid, path in _error_files() if path == log)


def _error_files() -> Iterator[tuple[int, Path]]:
    """Every process, and where its errors go."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "fd/2").readlink()
            except OSError:  # it has ended, or is another user's
                continue


class Bottom(nn.Module):
    """Passes the numbers on, and notices what the run is doing."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults
        self._steps = 0
        self.register_state_dict_pre_hook(self._notice_checkpoint)  # type: ignore[no-untyped-call]

    def forward(self, dense_BF: Tensor) -> Tensor:
        self._steps += self.training
        if not self.training and self._steps:  # not where the net is only looked at
            self._faults.reach("evaluation")
        elif self._steps > _STEPS_BEFORE:
            self._faults.reach("step")
        return dense_BF

    def _notice_checkpoint(self, *_: object) -> None:
        self._faults.reach("checkpoint")


def _notice_shutdown(faults: Faults) -> None:
    """Leaving the RPC group, no role gets further than this process, whose main thread notices it here."""
    leave = rpc.shutdown

    def shutdown(**arguments: Any) -> None:
        faults.reach("shutdown")
        leave(**arguments)

    rpc.shutdown = shutdown  # type: ignore[assignment]  # torch leaves its arguments untyped


def build(config: RunConfig, input_spec: InputSpec, widths: list[int]) -> DenseNet:
    """What trainers call."""
    faults = Faults(Path(config.run.folder))
    _notice_shutdown(faults)
    faults.reach("start")
    width = len(input_spec.dense_features) + sum(widths)
    head: Any = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten(0))
    return DenseNet(Bottom(faults), Concatenation(), head)

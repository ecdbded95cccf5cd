"""A custom net that injects faults into the roles of its run, each in a given phase.

A run has ``dense.net = "support.faulty_net:build"``, and a file with the faults in its folder. The net on
trainer 0 raises the exceptions of this trainer, and sends signals to the other roles.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.faults import ERRORS, FAULTS_FILE, RAISING, STRUCK_FILE, WORDS, read_times
from torch import Tensor, nn

from hybrid import transport
from hybrid.config import RunConfig
from hybrid.input_spec import InputSpec
from hybrid.models.dense_net import Concatenation, DenseNet

_TRAINER = "trainer 0"
_STEPS_BEFORE = 2
_DETECTION_SECONDS = 60.0


class Faults:
    """The next fault, if this process is trainer 0.

    Args:
        run: the folder of the run, which counts injected faults over restarts.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._next: tuple[str, str, str] | None = None
        faults = json.loads((run / FAULTS_FILE).read_text())
        done = len(read_times(run))
        if self._pid(_TRAINER) == os.getpid() and done < len(faults):
            self._next = tuple(faults[done])

    def reach(self, phase: str) -> None:
        """Inject the next fault if it is of this phase."""
        if self._next is None or self._next[2] != phase:
            return
        role, action, _ = self._next
        self._next = None
        pid = self._pid(role)
        with (self._run / STRUCK_FILE).open("a") as out:
            out.write(f"{time.time()}\n")
        if action in ERRORS and role == _TRAINER:
            raise ERRORS[action](WORDS)
        os.kill(pid, RAISING.get(action) or signal.Signals[action])
        if action != "SIGKILL":  # the phase must not end before the failure is detected
            threading.Event().wait(_DETECTION_SECONDS)

    def _pid(self, role: str) -> int:
        log = (self._run / f"logs/{role.replace(' ', '-')}.log").resolve()
        return next(pid for pid, path in _error_files() if path == log)


def _error_files() -> Iterator[tuple[int, Path]]:
    """Yield every process and the file of its standard error."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "fd/2").readlink()
            except OSError:  # the process has ended, or is another user's
                continue


class Bottom(nn.Module):
    """Returns its input, and detects the phases of the run."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults
        self._steps = 0
        self.register_state_dict_pre_hook(self._detect_checkpoint)  # type: ignore[no-untyped-call]

    def forward(self, dense_BF: Tensor) -> Tensor:
        self._steps += self.training
        if not self.training and self._steps:  # a check of the net is no evaluation
            self._faults.reach("evaluation")
        elif self._steps > _STEPS_BEFORE:
            self._faults.reach("step")
        return dense_BF

    def _detect_checkpoint(self, *_: object) -> None:
        if self._steps:  # a net that is loaded also returns its state
            self._faults.reach("checkpoint")


def _detect_shutdown(faults: Faults) -> None:
    """Detect the end of the RPC group, at which all roles wait for this process."""
    leave = transport.stop

    def stop(timeout_seconds: float) -> None:
        faults.reach("shutdown")
        leave(timeout_seconds)

    transport.stop = stop


def build(config: RunConfig, input_spec: InputSpec, widths: list[int]) -> DenseNet:
    """Build the net; a value of ``dense.net``."""
    faults = Faults(Path(config.run.folder))
    _detect_shutdown(faults)
    faults.reach("start")
    width = len(input_spec.dense_features) + sum(widths)
    head: Any = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten(0))
    return DenseNet(Bottom(faults), Concatenation(), head)

"""A net that harms the roles of its own run, one after the other, at the moments that faults.json names.

A run finds it where it is started, as ``dense.net = "faulty_net:build"``, and the faults in its run folder.
Trainer 0 does it all; the file struck.txt counts what is done, also over restarts.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.config import RunConfig
from hybrid.dense.nets import DenseNet
from hybrid.embedding.spec import InputSpec

_ME = "trainer 0"
_ERRORS = {"RuntimeError": RuntimeError, "MemoryError": MemoryError}
_STEPS_BEFORE = 2
_POLL_SECONDS = 0.002


class Faults:
    """The faults that are still to come: role, what to do to it, and the phase of the run."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._struck = run / "struck.txt"
        done = len(self._struck.read_text().splitlines()) if self._struck.exists() else 0
        self._next: tuple[str, str, str] | None = None
        faults = json.loads((run / "faults.json").read_text())
        if self._pid(_ME) == os.getpid() and done < len(faults):
            self._next = tuple(faults[done])
        if self._next is not None and self._next[2] == "shutdown":
            threading.Thread(target=self._await_result, daemon=True).start()

    def reach(self, phase: str) -> None:
        """Do what is to be done now, if that is so."""
        if self._next is None or self._next[2] != phase:
            return
        role, action, _ = self._next
        self._next = None
        with self._struck.open("a") as file:
            file.write(f"{time.time()} {role} {action} {phase}\n")
        if action in _ERRORS:
            raise _ERRORS[action]("as the test wants it")
        os.kill(self._pid(role), signal.Signals[action])

    def _await_result(self) -> None:
        while not (self._run / "result.json").exists():
            time.sleep(_POLL_SECONDS)
        self.reach("shutdown")

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
        if not self.training:
            self._faults.reach("evaluation")
        elif self._steps > _STEPS_BEFORE:
            self._faults.reach("step")
        return dense_BF

    def _notice_checkpoint(self, *_: object) -> None:
        self._faults.reach("checkpoint")


class SideBySide(nn.Module):
    def forward(self, dense_BF: Tensor, pooled_BE: Tensor) -> Tensor:
        return torch.cat([dense_BF, pooled_BE], dim=1)


def build(config: RunConfig, input_spec: InputSpec, widths: list[int]) -> DenseNet:
    """What trainers call."""
    faults = Faults(Path(config.run.folder))
    faults.reach("start")
    width = len(input_spec.dense_features) + sum(widths)
    head: Any = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten(0))
    return DenseNet(Bottom(faults), SideBySide(), head)

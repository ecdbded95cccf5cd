"""Run the commands as processes, signal them, and check that no process of theirs is left."""

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.forked_commands import ForkedCommand

from hybrid.security.secret import Secret
from workers.cli import main

ROOT = Path(__file__).resolve().parents[2]
HYBRID = (sys.executable, "-m", "hybrid")
COMMAND_SECONDS = 60.0
LEFT_SECONDS = 0.5
# A regular expression of the moment at which an endless run is stopped.
DOING = r"(at step \d+|while evaluating after step \d+)"
NOTHING: Mapping[str, str] = {}
_POLL_SECONDS = 0.02
_PORTS_NOT_ASSIGNED = (20_000, 32_000)  # by Linux to sockets without a port
OTHERS = "others"  # the folder in which roles by hand run, except the master


def settings(**sections: Mapping[str, object]) -> list[str]:
    """Return ``--set`` arguments: ``settings(train={"epochs": 2})``; values are written as in TOML."""
    return [
        text
        for name, keys in sections.items()
        for key, value in keys.items()
        for text in ("--set", f"{name}.{key}={value}")
    ]


ONE_EACH = settings(cluster={"trainers": 1, "workers": 1})
TRAINER, WORKER = ["trainer", "--index", "0"], ["worker", "--index", "0"]
# A job of 16 steps.
JOB = settings(
    data={"synthetic_rows": 2000}, train={"batch_size": 128, "log_every_steps": 1}, dense={"device": "cpu"}
)


def free_port() -> int:
    """Return a free port for roles that are started by hand.

    The system does not assign this port to any other process in the meantime.
    """
    while True:
        port = random.randrange(*_PORTS_NOT_ASSIGNED)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def eventually(condition: Callable[[], object], seconds: float = COMMAND_SECONDS) -> bool:
    """Return whether ``condition`` becomes true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


@dataclass
class Command:
    """A running command in its own session; its output goes to files."""

    process: subprocess.Popen[bytes] | ForkedCommand
    output: Path
    started_at: float = field(default_factory=time.monotonic)

    @property
    def stdout(self) -> str:
        return self.output.with_suffix(".out").read_text()

    @property
    def stderr(self) -> str:
        return self.output.with_suffix(".err").read_text()

    def await_text(self, text: str) -> None:
        """Wait until a text is printed."""
        assert eventually(lambda: text in self.stdout), self.stdout + self.stderr

    def await_step(self, step: int = 5) -> None:
        """Wait until a run reports this step."""
        self.await_text(f"\nstep {step}/")

    def wait(self, seconds: float = COMMAND_SECONDS, left_seconds: float = LEFT_SECONDS) -> Ended:
        """Wait for the end; fail if a process of the command outlives it by ``left_seconds``."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s: {self.stdout}{self.stderr}") from None
        gone = eventually(lambda: not self.processes(), left_seconds)
        assert gone, f"left behind: {[p.cmdline() for p in self.processes()]}"
        return Ended(code, self.stdout, self.stderr)

    def processes(self) -> list[psutil.Process]:
        """Return the command and all living processes that it started."""
        return processes_of(self.process.pid)

    def role(self, name: str) -> psutil.Process:
        """The process of a role under ``launch``."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if process.cmdline()[:1] == [f"hybrid {name}"]:
                    return process
        raise AssertionError(f"no {name} among {self.processes()}")

    def kill(self) -> None:
        """Kill the command and all its processes."""
        self.process.kill()
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):  # it has ended with the command
                process.kill()
        self.process.wait(COMMAND_SECONDS)


def processes_of(session: int) -> list[psutil.Process]:
    """Return all living processes of a session."""
    found = []
    for pid in psutil.pids():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(psutil.Process(pid))
    return found


def fresh_secret(folder: Path) -> list[str]:
    """Write a new secret to ``folder``; return the setting that names it."""
    file = folder / "secret"
    Secret.fresh().write(file)
    return settings(cluster={"secret_file": file})


@contextmanager
def by_hand(
    roles: Sequence[Sequence[object]], arguments: Sequence[object], folder: Path, *, afresh: bool = False
) -> Iterator[list[Command]]:
    """Start roles such as ``["trainer", "--index", 0]``, each by its own command, on one free port.

    The master runs in ``folder``, the others in an empty folder.

    Args:
        arguments: of the master; the others receive the configuration from it.
    """
    port, secret = free_port(), fresh_secret(folder)
    masters = [*arguments, *settings(cluster={"master": f"127.0.0.1:{port}"}), *secret]
    others = ["--master", f"127.0.0.1:{port}", *secret]
    (others_folder := folder / OTHERS).mkdir()
    with ExitStack() as stack:
        commands = []
        for role in roles:
            more, here = (masters, folder) if role[0] == "master" else (others, others_folder)
            commands.append(stack.enter_context(started([*role, *more], here, afresh=afresh)))
        yield commands


@contextmanager
def started(
    arguments: Sequence[object], folder: Path, *, afresh: bool = False, variables: Mapping[str, str] = NOTHING
) -> Iterator[Command]:
    """Start a command in ``folder``; kill it and its processes at the end of the block.

    Args:
        afresh: start a new interpreter, as a user does; else fork, see :mod:`support.forked_commands`.
        variables: environment variables to add.
    """
    output = folder / f"output-{uuid.uuid4().hex[:8]}"
    text = [str(argument) for argument in arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    if afresh:
        command = Command(start_process([*HYBRID, *text], environment, output, folder), output)
    else:
        command = Command(ForkedCommand(text, folder, environment, output), output)
    try:
        yield command
    finally:
        command.kill()


def start_process(
    command: Sequence[str], environment: Mapping[str, str], output: Path, folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a command in its own session; its output goes to the files of a :class:`Command`."""
    with output.with_suffix(".out").open("wb") as out, output.with_suffix(".err").open("wb") as err:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def run(
    arguments: Sequence[object], folder: Path, seconds: float = COMMAND_SECONDS, *, afresh: bool = False
) -> Ended:
    """Run a command in ``folder`` to its end; see :func:`started`."""
    with started(arguments, folder, afresh=afresh) as command:
        return command.wait(seconds)


def refusal(*arguments: object) -> str:
    """Return the only line of a command that fails in this process with exit code 1."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert isinstance(end.value.code, str), "a message means exit code 1"
    assert "\n" not in end.value.code
    return end.value.code


def output_of(arguments: Sequence[object], folder: Path, *, afresh: bool = False) -> str:
    """Return the output of a command that must succeed without warnings; see :func:`started`."""
    ended = run(arguments, folder, afresh=afresh)
    assert (ended.code, ended.stderr) == (0, "")
    return ended.stdout


def result_of(run_folder: Path) -> dict[str, Any]:
    """Return the content of a run's result.json."""
    values: dict[str, Any] = json.loads((run_folder / "result.json").read_text())
    return values


def code_block(page: str, language: str, having: str = "") -> str:
    """Return the only code block of ``language`` on a page that contains some words."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (code,) = (str(block) for block in blocks if having in block)
    return code


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its folder, the output of its command, and its settings."""

    folder: Path
    printed: str
    settings: list[str]

    def copy(self, folder: Path) -> Path:
        """Copy the run, to resume the copy."""
        return Path(shutil.copytree(self.folder, folder / "run"))

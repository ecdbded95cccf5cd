"""The launcher: starts every role of a cluster on this machine, watches them, and says who failed.

It does nothing that the roles need: started by hand they do the same. What it adds is speed (torch is
imported once, in a server process from which the roles are forked), logs, and a witness of how a
process died.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from hybrid.config import RunConfig
from hybrid.errors import ClusterError, ConfigError, HybridError
from hybrid.topology import MASTER, Role
from workers.listener import listen
from workers.paths import log_path
from workers.task import Task

# Constructing DDP imports torch._dynamo, which takes as long as torch itself.
_PRELOAD = ["torch._dynamo", "workers.master", "workers.trainer", "workers.worker"]
_POLL_SECONDS = 0.5
# The master may still find out what another role's end did to the run, and say it better.
_GRACE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a failed role says of itself.

    Attributes:
        message: one line.
        is_echo: whether it only repeats another role's failure.
    """

    message: str
    is_echo: bool


@dataclass(slots=True)
class Child:
    """A role's process, and how it ended."""

    role: Role
    process: ForkServerProcess
    reports: Connection
    ended_at: float | None = None

    def outcome(self, log: Path) -> Outcome | None:
        """What went wrong in an ended process; None where nothing did."""
        code = self.process.exitcode
        if not code:
            return None
        try:
            told = self.reports.recv() if self.reports.poll() else None
        except EOFError:
            told = None
        if isinstance(told, Outcome):
            return told
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return Outcome(f"{self.role} (pid {self.process.pid}) {how}; see {log}", False)


def launch(config: RunConfig, folder: Path, task: Task) -> None:
    """Run a whole cluster on this machine; returns when the task is done and every process has ended.

    Args:
        folder: for the roles' logs.
        task: what the cluster is for.

    Raises:
        ClusterError: a role failed; the message is the first cause.
        KeyboardInterrupt: the user or the system asked to stop.
    """
    children: list[Child] = []
    try:
        with listen(config.cluster.master_address, config.cluster.master_port) as listener:
            port = listener.getsockname()[1]
            config = config.replace(cluster=dataclasses.replace(config.cluster, master_port=port))
            _make_log_folder(folder)
            context = _start_server()
            for role in config.cluster.topology.roles:
                extra = (listener,) if role == MASTER else ()
                children.append(_start(context, role, config, folder, task, extra))
        _supervise(children, folder, config.cluster.stop_timeout_seconds)
    finally:
        _end(children, config.cluster.stop_timeout_seconds)
        _end_server()
        Console().show_cursor()  # a master that was killed could not


def _make_log_folder(folder: Path) -> None:
    try:
        log_path(folder, MASTER).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"cannot be made: {error.strerror}; choose another"
        raise ConfigError("run.folder", rule, str(folder)) from error


def _start_server() -> ForkServerContext:
    """Start the process that imports torch and forks the roles; Ctrl-C is not meant for it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    resource_tracker.ensure_running()  # else the server starts it, and that would unblock the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # which the server inherits
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    return context


def _end_server() -> None:
    """End that process at once: by itself it would take torch down for seconds first."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if forkserver.__name__ in " ".join(child.cmdline()):
                child.kill()


def _start(
    context: ForkServerContext,
    role: Role,
    config: RunConfig,
    folder: Path,
    task: Task,
    extra: tuple[Any, ...],
) -> Child:
    reports, sender = context.Pipe(duplex=False)
    arguments = (role, config, folder, task, sender, *extra)
    process = context.Process(target=_role_main, args=arguments, name=str(role))
    process.start()
    sender.close()
    return Child(role, process, reports)


def _supervise(children: list[Child], folder: Path, stop_timeout_seconds: float) -> None:
    """Wait until all have ended in peace; ClusterError with the first cause otherwise."""
    deadline: float | None = None
    while running := [c for c in children if c.ended_at is None]:
        wait([c.process.sentinel for c in running], _POLL_SECONDS)
        now = time.monotonic()
        for child in running:
            if not child.process.is_alive():
                child.ended_at = now
        ended = [c for c in children if c.ended_at is not None]
        if any(c.process.exitcode for c in ended):
            deadline = deadline or now + _GRACE_SECONDS
        elif any(c.role == MASTER for c in ended):
            deadline = deadline or now + 2 * stop_timeout_seconds
        if deadline is not None and now > deadline:
            break
    _raise_first_cause(children, folder)


def _raise_first_cause(children: list[Child], folder: Path) -> None:
    ended = sorted((c for c in children if c.ended_at is not None), key=lambda c: c.ended_at or 0.0)
    killed = [c for c in ended if (c.process.exitcode or 0) < 0]
    causes = [o for c in [*killed, *ended] if (o := c.outcome(log_path(folder, c.role))) is not None]
    if causes:
        raise ClusterError(next((o for o in causes if not o.is_echo), causes[0]).message)
    stuck = ", ".join(str(c.role) for c in children if c.ended_at is None)
    if stuck:
        raise ClusterError(f"{stuck} did not stop after the master had finished")


def _end(children: list[Child], timeout_seconds: float) -> None:
    """See that every process has ended: asked first, then killed."""
    for send in (ForkServerProcess.terminate, ForkServerProcess.kill):
        running = [c.process for c in children if c.process.is_alive()]
        for process in running:
            send(process)
        deadline = time.monotonic() + timeout_seconds / 2
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))


def _role_main(
    role: Role,
    config: RunConfig,
    folder: Path,
    task: Task,
    reports: Connection,
    listener: socket.socket | None = None,
) -> None:
    """What each child runs: its role, with its output in its log and its failure told to the launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    _end_with_parent()
    _log_to(log_path(folder, role), keep_stdout=role == MASTER)
    from workers.bootstrap import StoppedError
    from workers.roles import run_role

    try:
        run_role(role, config, task, listener)
    except Exception as error:
        traceback.print_exc()
        message = str(error) if isinstance(error, HybridError) else f"{role}: {type(error).__name__}: {error}"
        reports.send(Outcome(message, isinstance(error, StoppedError)))
        sys.exit(1)


def _end_with_parent() -> None:
    """End this process when the launcher ends, however it ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="watch launcher", daemon=True).start()


def _log_to(path: Path, keep_stdout: bool) -> None:
    """Send what this process prints, torch's own messages too, to its log; the master keeps its screen."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 2)
    if not keep_stdout:
        os.dup2(descriptor, 1)
    os.close(descriptor)

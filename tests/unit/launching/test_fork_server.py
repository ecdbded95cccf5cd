"""Processes forked by a server: what it tells of them, and that none outlives it."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support import forked
from support.commands import eventually

from hybrid.errors import ClusterError
from workers.launching.fork_server import BrokenServerError, Ended, ForkServer, Started
from workers.signals import STOP_SIGNALS

SECONDS = forked.SECONDS


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with ForkServer(["support.forked"]) as server:
        yield server


def running(server: ForkServer, target: Callable[..., None] = forked.pause) -> psutil.Process:
    """A process, named one, that is to run on, once the server says that it is there."""
    server.start("one", target, (), [])
    event = server.event(SECONDS)
    assert isinstance(event, Started)
    assert event.name == "one"
    return psutil.Process(event.pid)


def is_gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def read_to_end(reader: int) -> str:
    """What comes out of a pipe until nobody has its other end any more."""
    text = b""
    with open(reader, "rb", buffering=0) as file:
        while select.select([file], [], [], SECONDS)[0]:
            if not (part := file.read()):
                return text.decode()
            text += part
    raise AssertionError("somebody still has the other end")


def test_what_cannot_be_imported_is_told_and_not_tried_again() -> None:
    reason = "the process that starts the roles has failed: ModuleNotFoundError: No module named 'no_such'"
    for ask in (running, ForkServer.preload):
        with ForkServer(["no_such"]) as server, pytest.raises(BrokenServerError, match=f"^{reason}$"):
            ask(server)


def test_it_imports_before_the_first_start_if_it_is_asked_to(server: ForkServer) -> None:
    before = server.has_imported
    server.preload()
    assert (before, server.has_imported) == (False, True)
    server.preload()  # once
    running(server)


@pytest.mark.parametrize(
    ("target", "args", "exit_code"),
    [(forked.exit_with, (0,), 0), (forked.exit_with, (3,), 3), (forked.fail, (), 1)],
    ids=["in peace", "with a code", "with an exception"],
)
def test_it_tells_how_a_process_ended(
    server: ForkServer, target: Callable[..., None], args: tuple[int, ...], exit_code: int
) -> None:
    assert forked.exit_code(server, target, *args) == exit_code


def test_files_are_passed_on(server: ForkServer) -> None:
    readers = []
    for name in ("one", "two"):
        reader, writer = os.pipe()
        server.start(name, forked.write, (f"from {name}",), [writer])
        os.close(writer)
        readers.append(reader)
    for reader, name in zip(readers, ("one", "two"), strict=True):
        assert read_to_end(reader) == f"from {name}"


@pytest.mark.parametrize("target", [forked.pause, forked.freeze])
def test_a_signal_ends_a_process_whatever_it_does(server: ForkServer, target: Callable[..., None]) -> None:
    process = running(server, target)
    if target is forked.freeze:
        assert eventually(lambda: process.status() == psutil.STATUS_STOPPED, SECONDS)
    server.signal("one", signal.SIGKILL)
    assert server.event(SECONDS) == Ended("one", -signal.SIGKILL)
    server.signal("one", signal.SIGKILL)  # to nobody


def test_signals_that_stop_a_launch_are_not_for_its_processes(server: ForkServer) -> None:
    process = running(server)
    for each in (process, psutil.Process(process.ppid())):
        for number in STOP_SIGNALS:  # as a terminal or a scheduler sends them to all at once
            each.send_signal(number)
    assert server.event(0.1) is None
    assert process.is_running()


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "was frozen")],
    ids=["killed", "frozen"],
)
def test_a_server_that_is_gone_takes_its_processes_with_it(
    server: ForkServer, number: signal.Signals, how: str
) -> None:
    process = running(server)
    psutil.Process(process.ppid()).send_signal(number)
    with pytest.raises(ClusterError, match=rf"the process that starts the roles \(pid \d+\) {how}$"):
        server.event(SECONDS)
    assert is_gone(process)
    assert not server.is_running()
    with pytest.raises(ClusterError, match="has ended"):
        server.start("two", forked.pause, (), [])


def test_a_server_that_goes_on_in_time_was_not_frozen(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = psutil.Process(running(server).ppid())
    looks = []

    def poll(seconds: float) -> bool:
        # Stopped at every second look.
        looks.append(seconds)
        frozen.suspend() if len(looks) % 2 else frozen.resume()
        return False

    monkeypatch.setattr(server._connection, "poll", poll)
    assert server.event(0.3) is None
    frozen.resume()
    assert len(looks) > 2


def test_processes_end_with_the_block() -> None:
    with ForkServer(["support.forked"]) as server:
        process = running(server, forked.freeze)
    assert is_gone(process)


def test_a_busy_machine_does_not_fail_the_end_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = list[subprocess.Popen[bytes]]()

    def expire(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        busy.append(process)
        raise subprocess.TimeoutExpired(process.args, timeout or 0.0)

    with ForkServer(["support.forked"]) as server:
        process = running(server)
        monkeypatch.setattr(subprocess.Popen, "wait", expire)
    monkeypatch.undo()
    assert busy[0].wait(SECONDS) == -signal.SIGKILL
    assert eventually(lambda: is_gone(process), SECONDS)


def test_processes_end_with_a_launcher_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "support.forked", "pause", "freeze"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as launcher:
        assert launcher.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]
        assert len(processes) == 2
        server = psutil.Process(processes[0].ppid())
        assert eventually(lambda: processes[1].status() == psutil.STATUS_STOPPED, SECONDS)
        assert not is_gone(processes[0])
        launcher.kill()
    assert eventually(lambda: all(map(is_gone, [server, *processes])), 1.0)
    assert not list(tmp_path.iterdir())

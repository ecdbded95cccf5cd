"""Processes forked by a server: the server reports their ends, and no process outlives it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support import forked
from support.commands import eventually
from support.namespaces import needs_namespaces

from hybrid.errors import ClusterError, ConfigError, HybridError
from workers.exit_codes import STOP_SIGNALS
from workers.launching.fork_server import ForkServer, ProcessEnd

SECONDS = forked.SECONDS


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with ForkServer(["support.forked"]) as server:
        yield server


def running(server: ForkServer, target: Callable[..., None] = forked.pause) -> psutil.Process:
    """Return a running process, named one."""
    return psutil.Process(server.start(target, {"one": ()})["one"])


def is_gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_failed_import_is_reported_in_one_line() -> None:
    with ForkServer(["no_such"]) as server, pytest.raises(HybridError, match=r"'no_such'$") as raised:
        running(server)
    assert not isinstance(raised.value, ClusterError), "a restart would fail in the same way"


@pytest.mark.parametrize(
    ("target", "args", "exit_code"),
    [(forked.exit_with, (0,), 0), (forked.exit_with, (3,), 3), (forked.fail, (), 1)],
    ids=["success", "a code", "an exception"],
)
def test_exit_codes_are_reported(
    server: ForkServer, target: Callable[..., None], args: tuple[int, ...], exit_code: int
) -> None:
    assert forked.end_of(server, target, *args) == ProcessEnd("one", exit_code)


@pytest.mark.parametrize("length", [8, 1 << 15], ids=["short", "long"])
def test_each_process_can_send_a_report(length: int, server: ForkServer) -> None:
    reports = {name: name * (length // len(name)) for name in ("one", "four")}
    server.start(forked.send, {name: (text,) for name, text in reports.items()})
    ends = [server.event(SECONDS) for _ in range(2)]
    assert {each.name: each.report for each in ends if each} == reports


@pytest.mark.parametrize("target", [forked.pause, forked.freeze])
def test_a_signal_ends_a_process_in_any_state(server: ForkServer, target: Callable[..., None]) -> None:
    process = running(server, target)
    if target is forked.freeze:
        assert eventually(lambda: process.status() == psutil.STATUS_STOPPED, SECONDS)
    server.signal("one", signal.SIGKILL)
    assert server.event(SECONDS) == ProcessEnd("one", -signal.SIGKILL)
    server.signal("one", signal.SIGKILL)  # it has ended
    assert forked.end_of(server, forked.exit_with, 0) == ProcessEnd("one", 0)


def test_processes_have_names(server: ForkServer) -> None:
    pids = server.start(forked.pause, dict.fromkeys(("trainer 0", "worker 12"), ()))

    def shown() -> list[tuple[str, str]]:
        processes = [psutil.Process(pid) for pid in pids.values()]
        return [(each.name(), each.cmdline()[0]) for each in processes]

    named = [("trainer 0", "hybrid trainer 0"), ("worker 12", "hybrid worker 12")]
    assert eventually(lambda: shown() == named, SECONDS), shown()


def test_signals_for_the_launcher_do_not_stop_its_processes(server: ForkServer) -> None:
    process = running(server)
    for each in (process, psutil.Process(process.ppid())):
        for number in STOP_SIGNALS:  # as a terminal or a scheduler sends them to all at once
            each.send_signal(number)
    assert server.event(0.1) is None
    assert process.is_running()


def test_a_killed_server_takes_its_processes_with_it(server: ForkServer) -> None:
    process = running(server)
    psutil.Process(process.ppid()).kill()
    with pytest.raises(ClusterError, match=r"pid \d+.* ended$"):
        server.event(SECONDS)
    assert is_gone(process)
    assert not server.is_running()
    with pytest.raises(ClusterError, match="has ended"):
        server.start(forked.pause, {"two": ()})


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


@needs_namespaces
def test_processes_in_a_namespace_reach_only_each_other(server: ForkServer) -> None:
    server.isolate()
    assert forked.end_of(server, forked.connect, None).exit_code == 0
    with socket.create_server(("127.0.0.1", 0)) as outside:
        assert forked.end_of(server, forked.connect, outside.getsockname()[1]).exit_code == 1
    assert forked.end_of(server, forked.check_user, os.geteuid(), os.getegid()).exit_code == 0
    assert server.is_isolated


def test_processes_without_a_namespace_listen_on_the_network_of_the_machine(server: ForkServer) -> None:
    pids = server.start(forked.pause, {"one": (), "two": ()})
    ports = set()
    for pid in pids.values():
        connections = psutil.Process(pid).net_connections()
        ports |= {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    (port,) = ports
    socket.create_connection(("127.0.0.1", port), SECONDS).close()
    with pytest.raises(ConfigError, match=r"^cluster\.master = \d+: "):
        server.start(forked.pause, {"three": ()}, port=port)
    assert not server.is_isolated

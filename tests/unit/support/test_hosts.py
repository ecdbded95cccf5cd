"""Hosts of tests: what each has of its own, how they are cut off and ended, and that nothing is left."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.commands import eventually
from support.first_process import SECONDS
from support.hosts import Cable, Host, Switch
from support.namespaces import needs_hosts

pytestmark = needs_hosts

REACHES = "import socket, sys; socket.create_connection((sys.argv[1], 7000), 0.5).close()"
LISTEN = "import socket, time; s = socket.create_server(('', 7000)); time.sleep(60)"
MAKE_AND_WAIT = """
import sys, time
from pathlib import Path
from support.hosts import Switch
with Switch(Path(sys.argv[1])) as switch:
    host = switch.host()
    print(host.pid, flush=True)
    host.run("sleep", 60)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def switch(folder: Path) -> Iterator[Switch]:
    with Switch(folder) as switch:
        for _ in range(2):
            switch.host(folder)
        yield switch


def reaches(one: Host, other: Host) -> bool:
    try:
        one.run(sys.executable, "-c", REACHES, other.name)
    except AssertionError:
        return False
    return True


def listen_on(host: Host) -> None:
    host.run("sh", "-c", f'{sys.executable} -c "{LISTEN}" > /dev/null 2>&1 &')
    assert eventually(lambda: reaches(host, host), SECONDS)


def test_a_host_has_what_a_machine_has(switch: Switch, folder: Path) -> None:
    one, other = switch.hosts
    (folder / "of all").touch()
    for host in switch.hosts:
        host.run("touch", f"/tmp/{host.name}", f"/dev/shm/{host.name}", f"{folder}/{host.name}")
    said = [
        host.run("sh", "-c", f"hostname; ls /dev/shm /tmp; ls {folder}; ps ax | wc -l")
        for host in switch.hosts
    ]
    assert all(text.startswith(f"host-{number}\n") for number, text in enumerate(said))
    assert all(
        text.count(f"host-{number}") == 4 for number, text in enumerate(said)
    )  # its name, and its files
    assert all(text.count(f"host-{1 - number}") == 1 for number, text in enumerate(said)), "what they share"
    assert all(text.count("of all") == 1 for text in said)
    assert not Path("/dev/shm/host-0").exists()
    pids = [host.run("ps", "-eo", "pid=").split() for host in (one, other)]
    assert all(len(numbers) == 2 for numbers in pids), "the first, and ps"


def test_a_cable_is_pulled_and_put_back(switch: Switch) -> None:
    one, other = switch.hosts
    listen_on(other)
    assert reaches(one, other)
    switch.down(other)
    assert not reaches(one, other)
    switch.up(other)
    assert eventually(lambda: reaches(one, other), SECONDS)
    for process in other.processes():
        process.kill()


def test_a_frozen_host_does_nothing_and_a_killed_one_comes_back_empty(switch: Switch, folder: Path) -> None:
    one, other = switch.hosts
    listen_on(other)
    other.freeze()
    frozen = other.processes()
    (process,) = frozen
    assert eventually(lambda: process.status() == psutil.STATUS_STOPPED, SECONDS)
    assert reaches(one, other), "the network answers for it"
    other.wake()
    assert eventually(lambda: process.status() == psutil.STATUS_SLEEPING, SECONDS)
    other.kill()
    assert eventually(lambda: not process.is_running(), SECONDS)
    assert not reaches(one, other)
    back = switch.host(folder, number=1)
    assert switch.hosts == [one, back]
    assert (back.name, back.processes()) == (other.name, [])
    listen_on(back)
    assert reaches(one, back)


def test_hosts_end_with_the_process_that_made_them(folder: Path) -> None:
    paths = {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", MAKE_AND_WAIT, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=paths) as process:
        assert process.stdout is not None
        first = psutil.Process(int(process.stdout.readline()))
        switch_and_host = psutil.Process(process.pid).children(recursive=True)
        assert first in switch_and_host
        process.send_signal(signal.SIGKILL)
    assert eventually(lambda: not any(each.is_running() for each in switch_and_host), SECONDS)


DELAY_SECONDS, BITS = 0.02, 20e6
NUM_BYTES = 1_000_000
ECHO = "import socket; s = socket.create_server(('', 7000)); c, _ = s.accept(); c.sendall(c.recv(1)); {}"
SEND = f"c.sendall(bytes({NUM_BYTES})); c.recv(1)"
MEASURE = f"""
import socket, sys, time
each = socket.create_connection((sys.argv[1], 7000), 20)
start = time.monotonic()
each.sendall(b"1")
each.recv(1)
print(time.monotonic() - start)
start, left = time.monotonic(), {NUM_BYTES}
while left:
    left -= len(each.recv(left))
print(time.monotonic() - start)
"""


def test_a_cable_takes_the_time_of_its_length_and_its_width(folder: Path) -> None:
    with Switch(folder, Cable(DELAY_SECONDS, BITS)) as switch:
        one, other = switch.host(), switch.host()
        switch.host().kill()  # which is no matter to the others
        other.run("sh", "-c", f'{sys.executable} -c "{ECHO.format(SEND)}" > /dev/null 2>&1 &')
        assert eventually(lambda: ":1B58 " in other.run("cat", "/proc/net/tcp"), SECONDS)
        there_and_back, whole = map(float, one.run(sys.executable, "-c", MEASURE, other.name).split())
    assert 2 * DELAY_SECONDS < there_and_back < 10 * DELAY_SECONDS, "a busy machine is late too"
    by_width = NUM_BYTES * 8 / BITS
    assert by_width < whole < 3 * by_width

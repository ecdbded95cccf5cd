"""Hosts on one machine: process trees in namespaces, connected by a switch.

::

    switch ── a bridge in a network namespace of its own
      ├── host-0   own network, process numbers, mounts, name and shared memory; 10.77.0.1 on eth0
      └── host-1   the same; 10.77.0.2

Each host has its own process numbers, because TensorPipe takes another channel between processes that see
each other. Hosts share the project, its Python, and the folders that they are given. Each has its own
``/tmp``, home and ``/dev/shm``. All hosts end with the process that made them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import psutil
from support.namespaces import SECONDS, first_process, processes_in

ROOT = Path(__file__).resolve().parents[2]
HOME = Path("/tmp/home")  # of each host, where its commands run
INTERFACE = "eth0"
_MOST = 8
_NETWORK = "10.77.0"
_HARDWARE = "02:00:00:00:00"  # and the number, so that a restarted host has its former address
# Arguments: name, home, lines of /etc/hosts, folders that keep their paths.
_MAKE_HOST = r"""
echo "$1" > /proc/sys/kernel/hostname
home=$2 lines=$3; shift 3
mount -t tmpfs tmpfs /dev/shm
number=0
for kept; do
    mkdir "/dev/shm/$((++number))"
    mount --bind "$kept" "/dev/shm/$number"
done
mount -t tmpfs tmpfs /tmp
mkdir "$home"
number=0
for kept; do
    mkdir -p "$kept"
    mount --move "/dev/shm/$((++number))" "$kept"
    rmdir "/dev/shm/$number"
done
printf '%s' "$lines" > /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
"""


class Switch:
    """Connects hosts for the length of a ``with`` block, which ends them.

    Args:
        folder: for the output of commands on hosts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: list[Host] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._pid = self._stack.enter_context(first_process(["--net"], ""))
        self.configure("link add name bridge type bridge", "link set bridge up")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def host(self, *shared: Path, number: int | None = None) -> Host:
        """Start a host.

        Args:
            shared: folders that hosts share, under the same paths.
            number: of a killed host to restart; None for a new host.
        """
        number = len(self.hosts) if number is None else number
        host = self._stack.enter_context(Host(self, number, shared))
        self.configure(
            f"link add name {host.port} type veth peer name {INTERFACE} netns {host.pid}",
            f"link set {host.port} master bridge",
            f"link set {host.port} up",
        )
        host.configure(
            "link set lo up",
            f"link set {INTERFACE} address {_HARDWARE}:{number:02}",
            f"link set {INTERFACE} up",
            f"address add {host.address}/24 dev {INTERFACE}",
        )
        self.hosts[number : number + 1] = [host]
        return host

    def down(self, host: Host) -> None:
        """Disconnect a host; no message reports it."""
        self.configure(f"link set {host.port} down")

    def up(self, host: Host) -> None:
        """Connect a host again."""
        self.configure(f"link set {host.port} up")

    def unplug(self, host: Host) -> None:
        """Remove the port of a host that was killed."""
        with suppress(subprocess.CalledProcessError):  # the kernel may have removed it with the host
            self.configure(f"link delete {host.port}")

    def configure(self, *lines: str) -> None:
        """Run lines of ``ip`` in the switch."""
        _ip(self._pid, lines)


class Host:
    """A host, created by :meth:`Switch.host`.

    Attributes:
        name: of the host.
        address: on its interface.
        output: a folder of this machine for the output of commands.
        pid: of the first process, as seen from this machine.
        is_alive: whether the host runs.
    """

    def __init__(self, switch: Switch, number: int, shared: Sequence[Path]) -> None:
        self.name, self.address = _name(number), _address(number)
        self.port = f"to-{self.name}"
        self.output = switch.folder
        self.pid = 0
        self.is_alive = True
        self._switch = switch
        # Folders outside /tmp keep their paths anyway.
        kept = {path.resolve() for path in (ROOT, Path(sys.prefix), *shared)}
        self._kept = sorted(each for each in kept if each.is_relative_to("/tmp"))
        self._kept = [each for each in self._kept if not any(p in kept for p in each.parents)]
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        flags = ["--net", "--pid", "--mount", "--uts", "--ipc", "--mount-proc"]
        arguments = [self.name, HOME, _hosts_file(), *self._kept]
        self.pid = self._stack.enter_context(first_process(flags, _MAKE_HOST, *map(str, arguments)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def configure(self, *lines: str) -> None:
        """Run lines of ``ip`` on this host."""
        _ip(self.pid, lines)

    def run(self, *command: object) -> str:
        """Run a command on this host to its end; return its output."""
        ended = subprocess.run(
            [*self.entering, *map(str, command)], env=self.environment({}), capture_output=True, text=True,
            timeout=SECONDS,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    @property
    def entering(self) -> list[str]:
        """The words before a command that enters this host."""
        kinds = ("--net", "--pid", "--mount", "--uts", "--ipc")
        change_folder = 'cd "$0" && exec env "$@"'
        return ["nsenter", "--target", str(self.pid), *kinds, "sh", "-c", change_folder, str(HOME)]

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the variables for a command on this host: those of this process, and ``given``."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
        return {**own, "HOME": str(HOME), "PYTHONPATH": str(ROOT), **given}

    def processes(self) -> list[psutil.Process]:
        """Return all processes but the first, frozen ones too."""
        return [each for each in processes_in(self.pid) if each.pid != self.pid]

    def freeze(self) -> None:
        """Stop all processes; the kernel still answers on their connections."""
        for each in processes_in(self.pid):
            each.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Continue all processes."""
        for each in processes_in(self.pid):
            each.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the host and all its processes."""
        self._stack.close()
        self._switch.unplug(self)
        self.is_alive = False


def _name(number: int) -> str:
    return f"host-{number}"


def _address(number: int) -> str:
    return f"{_NETWORK}.{number + 1}"


def _hosts_file() -> str:
    named = "".join(f"{_address(number)} {_name(number)}\n" for number in range(_MOST))
    return f"127.0.0.1 localhost\n{named}"


def _ip(pid: int, lines: Sequence[str]) -> None:
    """Run lines of ``ip`` in the network of a process."""
    command, script = ["nsenter", "--target", str(pid), "--net", "ip", "-batch", "-"], "\n".join(lines)
    subprocess.run(command, input=script, capture_output=True, text=True, timeout=SECONDS, check=True)

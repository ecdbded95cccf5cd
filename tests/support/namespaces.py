"""Namespaces of tests: a first process, which others can enter, and which ends all of them."""

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache

import psutil
import pytest

SECONDS = 20.0
_FIRST_PROCESS = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what is left to it is no zombie
print("ready", flush=True)
while True:
    signal.pause()
"""


@cache
def hosts_refused() -> str:
    """Return why this process cannot create hosts; empty if it can."""
    if os.geteuid() != 0:
        return "hosts are namespaces, which take root to make"
    path, tools = f"{os.environ['PATH']}:/usr/sbin:/sbin", ("setpriv", "unshare", "nsenter", "ip", "mount")
    if missing := [tool for tool in tools if not shutil.which(tool, path=path)]:
        return f"hosts are namespaces, which take {', '.join(missing)} to make"
    flags = [f"--{kind}" for kind in ("net", "pid", "mount", "uts", "ipc", "fork", "mount-proc")]
    attempt = "mount -t tmpfs tmpfs /dev/shm && ip link add name a type veth peer name b"
    tried = subprocess.run(["unshare", *flags, "sh", "-c", attempt], capture_output=True, text=True)
    return f"hosts are namespaces, not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


@contextmanager
def first_process(flags: Sequence[str], script: str, *arguments: str) -> Iterator[int]:
    """Start the first process of new namespaces; yield its pid. It ends with the block or with this process.

    Args:
        flags: options of ``unshare`` that name the namespaces.
        script: a bash script with ``arguments``, which runs in the namespaces first.
    """
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", *flags, "--fork", "--kill-child"]
    be_first = shlex.join([sys.executable, "-S", "-E", "-c", _FIRST_PROCESS])
    command += ["bash", "-ec", f"{script}\nexec {be_first}", "bash", *arguments]
    with subprocess.Popen(  # with its complaints, since it has some where its child is killed
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "ready\n", process.stderr.read()
            (first,) = psutil.Process(process.pid).children()
            try:
                yield first.pid
            finally:
                first.kill()  # the system reports its end once all that is in there has ended
                process.wait(SECONDS)
        finally:
            process.kill()


def enter(first: int) -> None:
    """Enter the namespaces of a first process; only later children have its process numbers."""
    setns = ctypes.CDLL(None, use_errno=True).setns
    for kind in ("net", "uts", "ipc", "pid", "mnt"):
        with open(f"/proc/{first}/ns/{kind}", "rb") as namespace:
            if setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace.name}")


def processes_in(first: int) -> list[psutil.Process]:
    """Return the processes of a pid namespace, without zombies."""
    found = []
    with suppress(FileNotFoundError):  # the first process has ended, and all others with it
        namespace = os.readlink(f"/proc/{first}/ns/pid")
        for process in psutil.process_iter():
            with suppress(OSError, psutil.NoSuchProcess):
                is_here = os.readlink(f"/proc/{process.pid}/ns/pid") == namespace
                if is_here and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


_WAYS = (["--net"], ["--net", "--user", "--map-current-user"])
HAS_NAMESPACES = any(
    subprocess.run(["unshare", *way, "true"], capture_output=True).returncode == 0 for way in _WAYS
)
needs_namespaces = pytest.mark.skipif(
    not HAS_NAMESPACES, reason="needs user and network namespaces, which this system does not allow"
)
needs_hosts = pytest.mark.skipif(bool(hosts_refused()), reason=hosts_refused())

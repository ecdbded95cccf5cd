"""The daemons of Slurm on this machine: a controller, and a node for each component of a job."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import psutil

from hybrid.errors import HybridError
from workers.launching.fork_server import end_with_parent

NODES = ("n1", "n2", "n3")  # each component of a job gets separate nodes
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
_EVENT_SECONDS = 180.0  # timeout of each event; a step of Slurm waits 60 s for lost tasks
_END_SECONDS = 10.0
_POLL_SECONDS = 0.1
_KEY_BYTES = 1024
# A requeued job waits until the credentials of its previous start have expired.
_CREDENTIAL_SECONDS = 5
_CONFIGURATION = """
ClusterName=hybrid
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire={credential}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=bf_interval=1,sched_interval=2
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def unavailable_reason() -> str:
    """Return why Slurm cannot run here, or ""."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    packages = "apt-get install slurmctld slurmd slurm-client munge"
    return f"{', '.join(missing)} not found: {packages}" if missing else ""


class Slurm:
    """A Slurm cluster of three nodes, for the length of a ``with`` block.

    Attributes:
        environment: environment variables of Slurm commands.

    Raises:
        HybridError: Slurm does not start.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hybrid-slurm-")))
            self.environment = _configure(self._folder)
            self._stack = stack
            munge = [f"--{name}={self._folder}/munge.{name.partition('-')[0]}" for name in _MUNGE_FILES]
            self._start("munged", "--foreground", "--force", *munge)
            self._start("slurmctld", "-D", "-c")
            for node in NODES:
                self.bring_up(node)
            _await_nodes(self.environment)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            subprocess.run(["scancel", "--full", "--user=root"], env=self.environment, timeout=_END_SECONDS)
            wait_until(
                lambda: not _output_of(["squeue", "--noheader"], self.environment), "the jobs do not end"
            )

    def bring_up(self, node: str) -> None:
        """Start a node."""
        self._nodes[node] = self._start("slurmd", "-D", "-N", node)

    def bring_down(self, node: str) -> None:
        """Kill the daemon of a node and the supervisors of its steps."""
        daemon = self._nodes[node]
        supervisors = _supervisors(node)
        for each in (daemon, *supervisors):
            each.kill()
        daemon.wait(_END_SECONDS)

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        name = "-".join([command[0], command[-1][-2:]])
        log = self._stack.enter_context((self._folder / f"{name}.log").open("ab"))
        return self._stack.enter_context(_daemon(command, self.environment, log.fileno()))


def _supervisors(node: str) -> list[psutil.Process]:
    """Return the processes of Slurm that started the tasks of a node."""
    supervisors = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            parent = process.parent()
            is_task = process.environ().get("SLURMD_NODENAME") == node
            if is_task and parent is not None and parent.name() == "slurmstepd":
                supervisors[parent.pid] = parent
    return list(supervisors.values())


_MUNGE_FILES = ("key-file", "socket", "pid-file", "log-file", "seed-file")


def _configure(folder: Path) -> dict[str, str]:
    key = folder / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(os.urandom(_KEY_BYTES))
    for name in ("state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir()
    host = socket.gethostname()
    port, *ports = _free_ports(1 + len(NODES))
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={p} CPUs=16 RealMemory=200000"
        for node, p in zip(NODES, ports, strict=True)
    )
    text = _CONFIGURATION.format(
        host=host, port=port, folder=folder, nodes=nodes, credential=_CREDENTIAL_SECONDS
    )
    (folder / "slurm.conf").write_text(text)
    return {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def _daemon(
    command: Sequence[str], environment: dict[str, str], log: int
) -> Iterator[subprocess.Popen[bytes]]:
    parent = os.getpid()
    process = subprocess.Popen(
        command, env=environment, stdout=log, stderr=log, preexec_fn=lambda: end_with_parent(parent)
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_END_SECONDS)


def _await_nodes(environment: dict[str, str]) -> None:
    def are_up() -> bool:
        return _output_of(["sinfo", "--noheader", "--format=%D %t"], environment) == f"{len(NODES)} idle"

    wait_until(are_up, "the nodes do not start")


def wait_until(condition: Callable[[], bool], failure: str) -> None:
    """Wait for an event of Slurm; HybridError if it does not occur within three minutes."""
    deadline = time.monotonic() + _EVENT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise HybridError(f"Slurm: {failure}")
        time.sleep(_POLL_SECONDS)


def _output_of(command: Sequence[str], environment: dict[str, str]) -> str:
    """Return the output of a command; empty if it fails."""
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_END_SECONDS)
    return ended.stdout.strip()

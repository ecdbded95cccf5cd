"""``scripts/bench wide``: what a role of a wide cluster takes of its system, and how long the start takes.

A cluster of so many roles: a master, and trainers and workers in equal parts. It trains a small job, on this
machine (``hybrid launch``), or with ``--hosts`` between as many hosts: each role is started by hand, with a
network and processes of its own, which are namespaces of the system behind one router.
"""

import argparse
import dataclasses
import json
import secrets
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil
from rich.console import Console

from benchmark import report
from benchmark.machine import origin
from benchmark.processes import ERRORS, started
from benchmark.running import MeasurementError
from benchmark.systems import OWN_PYTHON
from benchmark.tables import TextTable, mib
from hybrid.security.secret import VARIABLE
from hybrid.topology import MASTER, Topology
from workers.run_folder.run_paths import scratch_logs

_STEPS = 10
_TIMEOUT_SECONDS = 600.0
_SECONDS_BETWEEN_LOOKS = 0.5
_LOOKS_AT_MEMORY = 8  # one of so many: it takes the system milliseconds a process
_HYBRID = (OWN_PYTHON, "-P", "-m", "workers")
_MASTER_ADDRESS = "10.0.0.1"
# A router, since the neighbours of 64 hosts on one bridge are more than the system keeps for all of them.
# Makes a host for each line that it reads, which is the command of a role, and waits for the first's end.
_HOSTS = r"""
set -e
echo 1 > /proc/sys/net/ipv4/ip_forward
inside='until ip link show eth0 > /dev/null 2>&1; do sleep 0.05; done
ip link set lo up; ip address add 10.0.0.$0/32 dev eth0; ip link set eth0 up
ip route add 169.254.1.1 dev eth0; ip route add default via 169.254.1.1; exec $1'
number=0
while read -r role; do
    number=$((number + 1))
    unshare --net --pid --fork --mount-proc --kill-child sh -c "$inside" $number "$role" < /dev/null &
    [ $number -gt 1 ] || master=$!
    while [ "$(readlink /proc/$!/ns/net)" = "$(readlink /proc/$$/ns/net)" ]; do sleep 0.02; done
    ip link add to$number type veth peer name eth0 netns $!
    ip address add 169.254.1.1/32 dev to$number; ip link set to$number up
    ip route add 10.0.0.$number dev to$number
done < "$1"
wait $master
"""


@dataclass
class Taken:
    """What a cluster has taken.

    Attributes:
        open_files, threads: the most that one role has had.
        memory_bytes: of all roles, pages that several have counted once; the most at any time.
        seconds_to_first_step: from the command to its end; between hosts, the master's.
    """

    roles: int
    open_files: int = 0
    threads: int = 0
    memory_bytes: int = 0
    seconds_to_first_step: float = 0.0

    def look(self, processes: Sequence[psutil.Process], with_memory: bool) -> None:
        """Take in what these have at the moment."""
        memory_bytes = 0
        for each in processes:
            with suppress(psutil.NoSuchProcess):
                self.open_files = max(self.open_files, each.num_fds())
                self.threads = max(self.threads, each.num_threads())
                memory_bytes += each.memory_full_info().pss if with_memory else 0
        self.memory_bytes = max(self.memory_bytes, memory_bytes)


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure a cluster of each size once."""
    folder = report.new_folder(options.output, "bench-wide")
    came_from = origin([OWN_PYTHON])
    taken = []
    with scratch_logs("bench-") as scratch:
        for roles in options.roles:
            taken.append(_measured(roles, options.hosts, options.open_files, scratch))
            console.print(f"{roles} roles: {taken[-1].seconds_to_first_step:.1f} s to the first step")
    where = "between hosts" if options.hosts else "on one machine"
    note = f"One run each of {_STEPS} steps {where}, `ulimit -n {options.open_files}`."
    raw = {"clusters": [dataclasses.asdict(each) for each in taken]}
    report.write(folder, "Wide clusters", came_from, raw, [note], [table := _table(taken)])
    report.show(console, [note], [table], folder)
    return 0


def _measured(roles: int, is_between_hosts: bool, open_files: int, scratch: Path) -> Taken:
    """Train on a cluster of so many roles.

    Raises:
        MeasurementError: it failed, or took too long.
    """
    topology = Topology(roles // 2, (roles - 1) // 2)
    run_folder = scratch / f"{roles}-roles"
    settings = _settings(topology, run_folder)
    if is_between_hosts:
        command = _between_hosts(topology, settings, scratch / "roles")
    else:
        command = [*_HYBRID, "launch", *settings]
    taken = Taken(roles)
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    limited = ["prlimit", f"--nofile={open_files}", *command]
    with started(limited, scratch, {VARIABLE: secrets.token_hex(32)}) as process:
        for look in count():
            if process.poll() is not None:
                break
            if time.monotonic() > deadline:
                raise MeasurementError(f"{roles} roles are not done after {_TIMEOUT_SECONDS:g} s")
            with suppress(psutil.NoSuchProcess):
                taken.look(psutil.Process(process.pid).children(recursive=True), look % _LOOKS_AT_MEMORY == 0)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_SECONDS_BETWEEN_LOOKS)
    if process.returncode:
        raise MeasurementError(f"{roles} roles have failed: {(scratch / ERRORS).read_text()}")
    result = json.loads((run_folder / "result.json").read_text())
    taken.seconds_to_first_step = result["seconds_to_first_step"]
    return taken


def _settings(topology: Topology, run_folder: Path) -> list[str]:
    """Arguments that name the cluster, and a small job."""
    settings = {
        "cluster.trainers": topology.num_trainers,
        "cluster.workers": topology.num_workers,
        "cluster.start_timeout_seconds": _TIMEOUT_SECONDS,
        "run.folder": run_folder,
        "data.cache_folder": run_folder.parent / "prepared",
        "data.synthetic_rows": 20_000,
        "data.synthetic_test_rows": 1000,
        "train.batch_size": 1024,
        "train.max_steps": _STEPS,
    }
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def _between_hosts(topology: Topology, settings: Sequence[str], file: Path) -> list[str]:
    """The command that starts every role on a host of its own; no word of it has a space."""
    masters = [*settings, "--set", f"cluster.master_address={_MASTER_ADDRESS}"]
    patience = f"cluster.start_timeout_seconds={_TIMEOUT_SECONDS}"
    others = ["--master", _MASTER_ADDRESS, "--set", patience]
    with file.open("w") as lines:
        print(*_HYBRID, MASTER.kind, *masters, file=lines)
        for role in (*topology.trainers, *topology.workers):
            print(*_HYBRID, role.kind, "--index", role.index, *others, file=lines)
    namespaces = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
    return [*namespaces, "bash", "-c", _HOSTS, "bash", str(file)]


def _table(taken: Sequence[Taken]) -> TextTable:
    header = ("roles", "open files", "threads", "MiB of all", "seconds to the first step")
    table = TextTable("Wide clusters", header)
    for t in taken:
        seconds = f"{t.seconds_to_first_step:.1f}"
        table.rows.append((str(t.roles), str(t.open_files), str(t.threads), mib(t.memory_bytes), seconds))
    return table

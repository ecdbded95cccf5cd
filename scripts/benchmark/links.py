"""``scripts/bench links``: samples/s over links with a delay or a low bandwidth, by update mode.

Master and trainer are on one host, the worker is on another; the hosts are network namespaces.
"""

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from support.commands import Command
from support.host_roles import MASTER, placed, started_on
from support.hosts import Host, Switch
from support.namespaces import hosts_refused

from benchmark import link_emulator, report
from benchmark.systems import OWN_PYTHON
from hybrid.errors import HybridError
from hybrid.loggers.record_file import METRICS_FILE, read_records
from workers.run_folder.run_access import scratch_logs

# Seconds from one host to the other, and bits per second.
LINKS = {"none": None, "1ms": (1e-3, 1e10), "5ms": (5e-3, 1e10), "20ms": (2e-2, 1e10), "100Mbit": (1e-4, 1e8)}
SHAPES = ((256, 16), (4096, 64))  # samples of a step, width of rows
_LOG_STEPS = 20
_JOB = (
    "data.synthetic_rows=200000 dense.device=cpu train.epochs=1000000 "
    f"train.eval_every_steps=1000000 train.log_every_steps={_LOG_STEPS}"
)
_TIMEOUT_SECONDS, _POLL_SECONDS = 120.0, 0.05


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure each link, shape and mode once.

    Raises:
        HybridError: this process cannot create hosts, or a run failed.
    """
    if reason := hosts_refused():
        raise HybridError(reason)
    folder, origin = report.new_folder(options.output, "bench-links"), report.origin([OWN_PYTHON])
    rates: dict[str, dict[str, float]] = {}
    for link in options.links:
        with scratch_logs("bench-") as scratch, _hosts(link, scratch) as hosts:
            for (size, dim), mode in itertools.product(SHAPES, options.modes):
                name = f"{size} samples, rows of {dim}, {mode}"
                job = f"{_JOB} train.batch_size={size} train.update={mode} embedding.dim={dim}"
                texts = [
                    *job.split(),
                    f"dense.bottom_mlp=[64,{dim}]",
                    f"data.cache_folder={scratch}/prepared",
                ]
                steps = _steps_per_second(hosts, texts, scratch / f"{size}-{mode}", options.seconds)
                rates.setdefault(name, {})[link] = size * steps
                console.print(f"{link}, {name}: {size * steps:,.0f} samples/s", highlight=False)
    table = report.new_table("Samples/s by link", "job", *options.links)
    for name, by_link in rates.items():
        table.add_row(name, *(f"{rate:,.0f}" for rate in by_link.values()))
    report.write(folder, {**origin, "samples_per_second": rates}, [], [table])
    report.show(console, folder, [], [table])
    return 0


@contextmanager
def _hosts(link: str, folder: Path) -> Iterator[list[Host]]:
    """Start two hosts, and between them a third one that emulates the link."""
    with Switch(folder) as switch:
        hosts = [switch.host(folder) for _ in range(2)]
        if (numbers := LINKS[link]) is None:
            yield hosts
            return
        router, ports = switch.host(), [host.port for host in hosts]
        switch.configure(*(f"link set {port} netns {router.pid}" for port in ports))
        router.configure(*(f"link set {port} up" for port in ports))
        command = [sys.executable, "-PSE", link_emulator.__file__, *map(str, numbers), *ports]
        with subprocess.Popen([*router.entering, *command], stdin=subprocess.DEVNULL) as emulator:
            try:
                yield hosts
            finally:
                emulator.kill()


def _steps_per_second(hosts: Sequence[Host], texts: Sequence[str], run: Path, seconds: float) -> float:
    """Return the speed of a run, measured for ``seconds`` after its first steps; then stop the run."""
    arguments = [word for text in (*texts, f"run.folder={run}") for word in ("--set", text)]
    with started_on(placed(hosts), arguments) as roles:
        first, start = _await_step(2 * _LOG_STEPS, roles[MASTER], run / METRICS_FILE)  # the warm-up
        time.sleep(seconds)
        last, end = _await_step(first + _LOG_STEPS, roles[MASTER], run / METRICS_FILE)
    return (last - first) / (end - start)


def _await_step(step: int, master: Command, log: Path) -> tuple[int, float]:
    """Wait until the run has logged this step; return the last logged step and its time."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while (logged := _last_step(log))[0] < step:
        with suppress(subprocess.TimeoutExpired):
            master.process.wait(_POLL_SECONDS)
            deadline = 0.0  # the master has ended
        if time.monotonic() > deadline:
            raise HybridError(f"no step {step}:\n{master.stdout}{master.stderr}")
    return logged


def _last_step(log: Path) -> tuple[int, float]:
    steps = [(each["step"], each["time"]) for each in read_records(log) if each["kind"] == "train"]
    return max(steps, default=(0, 0.0))

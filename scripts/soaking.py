"""A long run that measures the growth of memory, threads and files of each role: ``scripts/soak``."""

import json
import shutil
import time
from pathlib import Path

import numpy as np

from hybrid import transport
from hybrid.config import RunConfig
from hybrid.data.prepare.preparation import ensure_prepared
from hybrid.topology import Role, Topology
from workers.controller.session import DatasetSession

INTERVALS = 100
_WARM_UP = 0.2  # fraction of the intervals to leave out, in which caches fill
_FOLDER = Path("runs") / "soak"
_PING_SECONDS = 10.0


def measure(topology: Topology, config: RunConfig) -> None:
    """Train; after each interval evaluate, write a checkpoint and measure every role. Print the growth."""
    session = DatasetSession(topology, config, ensure_prepared(config))
    roles = [*topology.trainers, *topology.workers]
    statuses: dict[Role, list[transport.ProcessStatus]] = {role: [] for role in roles}
    shutil.rmtree(_FOLDER, ignore_errors=True)
    interval = config.train.max_steps // INTERVALS  # in steps
    start = time.monotonic()
    for step in range(0, interval * INTERVALS, interval):
        _train(session, step, interval)
        session.evaluate(step + interval)
        shutil.rmtree(session.save(_FOLDER / "checkpoint", step + interval, 0))
        calls = {role: transport.ping(role, _PING_SECONDS) for role in roles}
        for role, call in calls.items():
            statuses[role].append(call.wait())
    seconds = time.monotonic() - start
    session.close()
    lines = [_summary(role, of_role, interval) for role, of_role in statuses.items()]
    print(f"{interval * INTERVALS} steps, {INTERVALS} evaluations and checkpoints, {seconds:.0f} s")
    print(*(json.dumps(line) for line in lines), sep="\n")
    (_FOLDER / "soak.json").write_text(json.dumps(lines, indent=1), encoding="utf-8")


def _train(session: DatasetSession, step: int, num_steps: int) -> None:
    end = step + num_steps
    while step < end:
        epoch, within = divmod(step, session.steps_per_epoch)
        count = min(end - step, session.steps_per_epoch - within)
        session.train(epoch, within, count, step)
        step += count


def _summary(role: Role, statuses: list[transport.ProcessStatus], interval: int) -> dict[str, float | str]:
    """Return the memory, threads and files of a role after the warm-up; a fitted line gives the growth."""
    steady = statuses[int(_WARM_UP * len(statuses)) :]
    thousand_steps = np.arange(len(steady)) * interval / 1000
    slope = np.polyfit(thousand_steps, [v.resident_bytes for v in steady], 1)[0]
    return {
        "role": str(role),
        "resident_mib": round(steady[-1].resident_bytes / 2**20, 1),
        "kib_per_thousand_steps": round(slope / 2**10, 1),
        "threads": f"{min(v.threads for v in steady)} to {max(v.threads for v in steady)}",
        "open_files": f"{min(v.open_files for v in steady)} to {max(v.open_files for v in steady)}",
        "most_live_contexts": max(v.live_contexts for v in statuses),
    }

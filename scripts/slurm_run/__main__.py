"""Runs configs/cluster/slurm.sh on a Slurm of this machine, harms it twice, and compares the end."""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from chaos_run.sameness import differences

from hybrid.checkpoint.folders import step_of, stored
from hybrid.errors import HybridError
from slurm_run.daemons import slurm, why_not

_PROJECT = Path(__file__).resolve().parents[2]
_SECONDS = 150.0  # for each thing to happen
_POLL_SECONDS = 0.1
_WORKER = "3"  # a rank: 1 master, 2 trainers, 2 workers
_JOB = """
[run]
folder = "run"
[data]
synthetic_rows = 4000
synthetic_test_rows = 500
cache_folder = "prepared"
[train]
batch_size = 128
epochs = 30
eval_every_steps = 480
[checkpoint]
every_steps = 20
[cluster]
start_timeout_seconds = 120
"""


def main() -> int:
    """Run it; 0, or 1 where the end is another one."""
    if reason := why_not():
        print(f"scripts/slurm: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="hybrid-job-") as name, slurm() as environment:
        folder = Path(name)
        (folder / "job.toml").write_text(_JOB)
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        environment["OMP_NUM_THREADS"] = "1"
        try:
            _run_disturbed(folder, environment)
        except HybridError as error:
            print(f"scripts/slurm: {error}\n{_output(folder)}", file=sys.stderr)
            return 1
        whole = [
            sys.executable,
            "-m",
            "workers",
            "launch",
            "--config",
            "job.toml",
            "--set",
            "run.folder=whole",
        ]
        subprocess.run(whole, cwd=folder, env=environment, check=True, capture_output=True)
        found = differences(folder / "whole", folder / "run")
    print(*(found or ["the end has the bits of an undisturbed run"]), sep="\n")
    return 1 if found else 0


def _run_disturbed(folder: Path, environment: dict[str, str]) -> None:
    def ask(*command: str) -> str:
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
        return ended.stdout.strip()

    script = str(_PROJECT / "configs/cluster/slurm.sh")
    number = ask("sbatch", "--parsable", "--output=output", script, "--config", "job.toml")
    _await(lambda: _newest(folder) >= 40, "no step 40")
    worker = _worker_of(folder)
    print(f"step {_newest(folder)}: worker 0 (pid {worker.pid}) is killed")
    worker.send_signal(signal.SIGKILL)
    _await(lambda: "starting again" in _output(folder), "not requeued after a kill")
    _await_start(lambda: "going on from step" in _output(folder), number, ask)
    before = _newest(folder)
    _await(lambda: _newest(folder) > before, "no step after a kill")
    print(f"step {_newest(folder)}: Slurm warns that the time is over")
    ask("scancel", "--batch", "--signal=USR1", number)
    _await(lambda: _output(folder).count("starting again") == 2, "not requeued after a warning")
    print(f"step {_newest(folder)}: saved, and requeued")
    _await_start(lambda: (folder / "run/result.json").exists(), number, ask)
    _await(lambda: "COMPLETED" in ask("scontrol", "show", "job", number), "no end of the job")
    print(f"step {_newest(folder)}: the run is over, and so is the job")


def _await_start(condition: Callable[[], bool], number: str, ask: Callable[..., str]) -> None:
    """Wait for another start; where nothing else happens, Slurm looks at no job of several components."""

    def look() -> bool:
        ask("scontrol", "update", f"JobId={number}", f"Comment={time.monotonic()}")
        return condition()

    _await(look, "not started again")


def _newest(folder: Path) -> int:
    return next(map(step_of, stored(folder / "run")), 0)


def _output(folder: Path) -> str:
    file = folder / "output"
    return file.read_text() if file.exists() else ""


def _worker_of(folder: Path) -> psutil.Process:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_role = process.environ().get("SLURM_PROCID") == _WORKER and "role" in process.cmdline()
            if is_role and process.cwd() == str(folder):
                return process
    raise HybridError("worker 0 is not there")


def _await(condition: Callable[[], bool], failure: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise HybridError(failure)
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())

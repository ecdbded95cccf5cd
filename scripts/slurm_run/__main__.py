"""Run configs/cluster/slurm.sh on a local Slurm, kill roles and nodes, and compare the result."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from chaos_run.run_comparison import differences

from hybrid.checkpoint.checkpoint_folders import list_checkpoints, parse_step
from hybrid.errors import HybridError
from slurm_run.daemons import NODES, Slurm, unavailable_reason, wait_until

_PROJECT = Path(__file__).resolve().parents[2]
_RANKS = {"worker 0": 3, "trainer 0": 1, "the master": 0}  # of 1 master, 2 trainers, 2 workers
_GOING_ON = "resuming from step"
_JOB = """
[run]
folder = "run"
[data]
synthetic_rows = 4000
cache_folder = "prepared"
[train]
batch_size = 128
epochs = 20
update = "lookahead"
eval_every_steps = 320
[checkpoint]
every_steps = 20
[cluster]
start_timeout_seconds = 120
"""


def main() -> int:
    """Run; return 0, 1 for another result, or 2 if Slurm is not available."""
    if reason := unavailable_reason():
        print(f"scripts/slurm: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="hybrid-job-") as name, Slurm() as slurm:
        folder = Path(name)
        (folder / "job.toml").write_text(_JOB)
        slurm.environment["PATH"] = f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"
        slurm.environment["OMP_NUM_THREADS"] = "1"
        job = _Job(folder, slurm)
        try:
            job.run_disturbed()
        except HybridError as error:
            print(f"scripts/slurm: {error}\n{job.output}", file=sys.stderr)
            return 1
        arguments = "-m hybrid launch --config job.toml --set run.folder=uninterrupted"
        subprocess.run(
            [sys.executable, *arguments.split()],
            cwd=folder,
            env=slurm.environment,
            check=True,
            capture_output=True,
        )
        differing = differences(folder / "uninterrupted", folder / "run")
    print(*(differing or ["the result is bit-identical to that of an uninterrupted run"]), sep="\n")
    return 1 if differing else 0


class _Job:
    """The job in the queue of Slurm, which requeues itself."""

    def __init__(self, folder: Path, slurm: Slurm) -> None:
        self._folder = folder
        self._slurm = slurm
        self._begun_at = time.monotonic()
        script = str(_PROJECT / "configs/cluster/slurm.sh")
        self._number = self._run("sbatch", "--parsable", "--output=output", script, "--config", "job.toml")

    def run_disturbed(self) -> None:
        """Disturb the job after each new checkpoint, and wait for its end.

        Raises:
            HybridError: the job does not resume, or does not end.
        """
        wait_until(lambda: self._newest > 0, "no checkpoint")
        for name, rank in _RANKS.items():
            self._log(f"{name} is killed")
            self._role(rank).kill()
            self._await_resumed()
        self._log(f"node {NODES[-1]} goes down, with the workers")
        self._slurm.bring_down(NODES[-1])
        wait_until(lambda: self._restarts == len(_RANKS) + 1, "not requeued after a node was lost")
        self._log("requeued; the node comes back")
        self._slurm.bring_up(NODES[-1])
        self._await_resumed()
        self._log("Slurm signals the time limit")
        self._run("scancel", "--batch", "--signal=USR1", self._number)
        self._await_resumed()
        self._await_start(lambda: (self._folder / "run/result.json").exists())
        wait_until(
            lambda: "COMPLETED" in self._run("scontrol", "show", "job", self._number), "the job does not end"
        )
        self._log("the run and the job have ended")

    @property
    def output(self) -> str:
        """The output of the job script and its roles."""
        file = self._folder / "output"
        return file.read_text() if file.exists() else ""

    def _await_resumed(self) -> None:
        """Wait until the job has been started again and has written a checkpoint."""
        starts, before = self.output.count(_GOING_ON), self._newest
        self._await_start(lambda: self.output.count(_GOING_ON) > starts)
        wait_until(lambda: self._newest > before, "no checkpoint after another start")

    def _await_start(self, condition: Callable[[], bool]) -> None:
        """Wait for another start.

        Each look updates the job, because an idle Slurm does not schedule heterogeneous jobs.
        """

        def look() -> bool:
            self._run("scontrol", "update", f"JobId={self._number}", f"Comment={time.monotonic()}")
            return condition()

        wait_until(look, "not started again")

    @property
    def _newest(self) -> int:
        return next(map(parse_step, list_checkpoints(self._folder / "run")), 0)

    @property
    def _restarts(self) -> int:
        return self.output.count("restarting")

    def _role(self, rank: int) -> psutil.Process:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_role = process.environ().get("SLURM_PROCID") == str(rank) and "role" in process.cmdline()
                if is_role and process.cwd() == str(self._folder):
                    return process
        raise HybridError(f"the role of rank {rank} is not running")

    def _log(self, what: str) -> None:
        print(f"{time.monotonic() - self._begun_at:5.0f} s, step {self._newest}: {what}", flush=True)

    def _run(self, *command: str) -> str:
        ended = subprocess.run(
            command, cwd=self._folder, env=self._slurm.environment, capture_output=True, text=True, check=True
        )
        return ended.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

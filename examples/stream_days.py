"""Train on a log while its days arrive, kill a worker, and double the cluster.

    python examples/stream_days.py FOLDER

writes days of a log that drifts (``drifting_log.py``) into ``FOLDER/log``, one after the other, while a run
reads them:

- Monday's folder trains. Every row is predicted before the model trains on it.
- Tuesday's folder arrives, with new users and items. While it trains, a worker is killed.
- On Wednesday, the run is stopped, and continues with twice the trainers and workers.
- Meanwhile, ``FOLDER/served`` has an exported model that follows the run.

``FOLDER/auc.csv`` has the AUC of each day, beside the AUC of the true probabilities.
"""

import csv
import json
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

import psutil

HERE = Path(__file__).parent
DAYS = ("day=01", "day=02", "day=03")
STREAM = "files(marker = '_SUCCESS', wait_hours = 0.1, until = 'log/day=03')"
SECONDS = 300


class Log:
    """The log of a run: its records, and a wait for one of them."""

    def __init__(self, run: Path, process: subprocess.Popen[bytes]) -> None:
        self._file = run / "metrics.jsonl"
        self._process = process

    def records(self, kind: str) -> list[dict[str, float]]:
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def await_records(self, kind: str, count: int) -> None:
        """Wait for so many records of a kind; RuntimeError if the run ends before."""
        deadline = time.monotonic() + SECONDS
        while len(self.records(kind)) < count:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self._file} has no {count} records of kind {kind}")
            time.sleep(0.1)


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a command of hybrid."""
    return subprocess.Popen([sys.executable, "-m", "hybrid", *arguments], cwd=folder)


def publish(folder: Path, day: str) -> None:
    """Move a day to where the run reads it; the last file completes the folder."""
    (folder / "log").mkdir(exist_ok=True)
    (folder / "written" / day).rename(folder / "log" / day)
    (folder / "log" / day / "_SUCCESS").touch()


def kill_worker(launcher: int) -> None:
    """Kill a worker; the launcher restarts the run from its last checkpoint."""
    for process in psutil.Process(launcher).children(recursive=True):
        if process.cmdline()[:1] == ["hybrid worker 0"]:
            process.kill()


def main() -> None:
    parser = ArgumentParser(description="Train on a log while its days arrive.")
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--rows", type=int, default=200_000, help="rows per day (default: 200,000)")
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True)
    log = [str(HERE / "drifting_log.py"), str(folder / "written"), f"--days={len(DAYS)}"]
    subprocess.run([sys.executable, *log, f"--rows={options.rows}"], check=True)

    publish(folder, DAYS[0])
    config = str(HERE.parent / "configs/stream.toml")
    values = (
        "run.folder=run",
        f"data.stream={STREAM}",
        "checkpoint.every_steps=50",
        "checkpoint.deltas=every(seconds = 5)",
        "train.log_every_steps=5",
    )
    run = start(folder, "launch", "--config", config, *(part for each in values for part in ("--set", each)))
    follower = start(folder, "export", "run", "--output", "served", "--follow")
    records = Log(folder / "run", run)
    records.await_records("unit", 1)
    publish(folder, DAYS[1])
    records.await_records("train", len(records.records("train")) + 3)
    kill_worker(run.pid)
    records.await_records("unit", 2)
    run.terminate()  # the run writes a checkpoint
    run.wait(SECONDS)

    publish(folder, DAYS[2])
    doubled = ("--set", "cluster.trainers=4", "--set", "cluster.workers=4")
    run = start(folder, "launch", "--resume", "run", *doubled)
    for process, name in ((run, "run"), (follower, "export")):
        if process.wait(SECONDS):
            raise SystemExit(f"the {name} ended with exit code {process.returncode}")
    with (folder / "written/best_auc.csv").open() as file:
        best = [float(line["auc"]) for line in csv.DictReader(file)]
    units = records.records("unit")
    lines = [f"{day},{unit['auc']:.4f},{auc:.4f}" for day, unit, auc in zip(DAYS, units, best, strict=True)]
    (folder / "auc.csv").write_text("\n".join(["day,auc,best reachable", *lines, ""]))
    print("", "day     AUC     best reachable", *(line.replace(",", "  ") for line in lines), sep="\n")


if __name__ == "__main__":
    main()

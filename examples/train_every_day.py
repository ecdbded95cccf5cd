"""Train on each day of a log that drifts, and test on the next day, in three ways (docs/every_day.md).

    python examples/train_every_day.py FOLDER --days 8

The log is that of ``drifting_log.py``. Each run starts with the model of the day before:

- frozen: the tables keep the rows of day 1; later values have no rows.
- growing: a value gets a row when it appears.
- prepared: each day has a vocabulary of its own. Values that the day before has keep their rows.

FOLDER gets the log, the runs, and ``auc.csv`` and ``auc.svg``: the AUC by tested day, and the best that a
model can reach.
"""

import csv
import json
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import matplotlib.pyplot as plt

EXAMPLES = Path(__file__).resolve().parent
CONFIG = EXAMPLES.parent / "configs/every_day.toml"
# The vocabulary of day 1, and that of later days.
WAYS = {
    "frozen": ("grow", "grow(admit_after = 1000000)"),
    "growing": ("grow", "grow"),
    "prepared": ("build", "build"),
}


def train(folder: Path, way: str, day: int) -> float:
    """Train on a day; return the AUC on the next day."""
    settings = {
        "data.path": f"log/day={day:02d}",
        "data.test_path": f"log/day={day + 1:02d}",
        "data.vocabulary": WAYS[way][day > 1],
        "run.folder": f"runs/{way}-{day:02d}",
    }
    if day > 1:
        settings["train.initial"] = f"runs/{way}-{day - 1:02d}"
    command = [sys.executable, "-m", "hybrid", "launch", "-q", "--config", str(CONFIG)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    subprocess.run(command, cwd=folder, check=True)
    result = json.loads((folder / settings["run.folder"] / "result.json").read_text())
    return float(result["auc"])


def main() -> None:
    parser = ArgumentParser(description="Train on each day of a log that drifts, in three ways.")
    parser.add_argument("folder", type=Path, help="a new folder, for the log and the runs")
    parser.add_argument("--days", type=int, default=8, help="days of the log (default: 8)")
    parser.add_argument("--rows", type=int, default=200_000, help="rows per day (default: 200,000)")
    options = parser.parse_args()
    log = [sys.executable, EXAMPLES / "drifting_log.py", options.folder / "log"]
    subprocess.run([*log, f"--days={options.days}", f"--rows={options.rows}"], check=True)
    with (options.folder / "log/best_auc.csv").open() as file:
        best = {int(line["day"]): float(line["auc"]) for line in csv.DictReader(file)}
    tested = range(2, options.days + 1)
    auc = {way: [train(options.folder, way, day - 1) for day in tested] for way in WAYS}
    auc["best reachable"] = [best[day] for day in tested]
    with (options.folder / "auc.csv").open("w") as file:
        for row in (["day", *auc], *zip(tested, *auc.values(), strict=True)):
            line = ",".join(f"{each:.4f}" if isinstance(each, float) else str(each) for each in row)
            print(line, file=file)
            print(line)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, values in auc.items():
        axes.plot(tested, values, marker="o", label=name)
    axes.set(xlabel="tested day", ylabel="AUC")
    axes.legend()
    figure.savefig(options.folder / "auc.svg")


if __name__ == "__main__":
    main()

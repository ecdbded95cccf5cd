"""What a run says, what evaluate says, and what predict writes are of one model, and agree."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.commands import Ended, run, settings

from workers.cli import main

NUM_ROWS = 80


@dataclass(frozen=True)
class Clicks:
    """A finished run on a file of few distinct rows, which are its test rows too."""

    folder: Path
    file: Path
    ended: Ended

    @property
    def result(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return values

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        return np.array([int(row["clicked"]) for row in csv.DictReader(self.file.read_text().splitlines())])

    def predicted(self, scratch: Path, *arguments: object) -> npt.NDArray[np.float64]:
        """What predict writes, row by row."""
        output = scratch / f"p{len(arguments)}.csv"
        main(["predict", *map(str, [self.folder, *arguments]), "--output", str(output)])
        rows = list(csv.DictReader(output.read_text().splitlines()))
        assert [int(row["row"]) for row in rows] == list(range(NUM_ROWS))
        return np.array([float(row["probability"]) for row in rows])


def write_clicks(path: Path) -> None:
    """Ten kinds of rows; clicks have little to do with them."""
    random = np.random.default_rng(7)
    kinds = [
        (f"{random.normal():.2f}", random.integers(90), f"i{kind % 4}", "|".join("abc"[: kind % 3]))
        for kind in range(10)
    ]
    with path.open("w") as file:
        print("clicked,price,age,item,tags", file=file)
        for kind in random.integers(10, size=NUM_ROWS):
            print(int(random.random() < 0.4 + 0.02 * kind), *kinds[kind], sep=",", file=file)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Clicks:
    """Three trainers, and batches of a size that puts equal rows anywhere; tables are split in two."""
    folder = tmp_path_factory.mktemp("clicks")
    file = folder / "clicks.csv"
    write_clicks(file)
    arguments = settings(
        run={"folder": folder / "run"},
        cluster={"trainers": 3},
        data={
            "format": "csv",
            "path": file,
            "test_path": file,
            "label": "clicked",
            "dense": ["price", "age"],
            "sparse": ["item", "tags"],
            "multi_hot_separator": "|",
            "cache_folder": folder / "prepared",
        },
        dense={"device": "cpu"},
        embedding={"placement": "row"},
        train={"batch_size": 29, "epochs": 2},
    )
    ended = run(["launch", *arguments], folder)
    assert (ended.code, ended.stderr) == (0, "")
    return Clicks(folder / "run", file, ended)


def auc_of(probabilities_N: npt.NDArray[np.float64], labels_N: npt.NDArray[np.int64]) -> float:
    """By its definition: the share of pairs in the right order, of which a tie is half."""
    ahead_PQ = probabilities_N[labels_N == 1][:, None] - probabilities_N[labels_N == 0]
    return float(((ahead_PQ > 0) + 0.5 * (ahead_PQ == 0)).mean())


def test_run_evaluate_and_predict_have_one_auc(clicks: Clicks, tmp_path: Path) -> None:
    """Also where most rows stand there many times, each at other places of a batch."""
    labels_N = clicks.labels
    probabilities_N = clicks.predicted(tmp_path)
    assert len(set(probabilities_N.tolist())) == 10
    expected = auc_of(probabilities_N, labels_N)
    assert clicks.result["auc"] == pytest.approx(expected, abs=1e-15)
    assert auc_of(clicks.predicted(tmp_path, "--input", clicks.file), labels_N) == expected


def test_run_evaluate_and_predict_agree_in_every_metric(
    clicks: Clicks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels_N = clicks.labels
    probabilities_N = clicks.predicted(tmp_path)
    result = clicks.result
    log_loss = -np.log(np.where(labels_N == 1, probabilities_N, 1 - probabilities_N)).mean()
    assert result["log_loss"] == pytest.approx(log_loss, rel=1e-6)
    assert result["calibration"] == pytest.approx(probabilities_N.sum() / labels_N.sum(), rel=1e-6)
    capsys.readouterr()
    main(["evaluate", str(clicks.folder)])
    said = capsys.readouterr().out
    for name in ("auc", "log_loss", "normalised_entropy", "calibration", "accuracy", "base_rate"):
        assert f"{name.replace('_', ' '):<20}{result[name]:.4f}\n" in said

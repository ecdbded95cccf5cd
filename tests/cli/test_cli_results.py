"""A run, evaluate and predict report the same metrics and predictions of a model."""

import csv
import re
import runpy
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cli.test_cli_tasks import weighted_auc
from support.commands import ROOT, output_of, result_of, settings

from hybrid.checkpoint.checkpoint_folders import step_folder
from workers.cli import main

NUM_ROWS = 80
BEST, LAST = 2, 4  # steps; the AUC falls after the second


@dataclass(frozen=True)
class Clicks:
    """A finished run on a file of few distinct rows, whose best evaluation is not the last one.

    Attributes:
        file: its test rows.
        printed: the output of its command.
    """

    folder: Path
    file: Path
    printed: str

    @property
    def result(self) -> dict[str, Any]:
        return result_of(self.folder)

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        return np.array([int(row["clicked"]) for row in csv.DictReader(self.file.read_text().splitlines())])

    def checkpoint(self, step: int) -> Path:
        return step_folder(self.folder, step)

    def predict(self, of: Path, *arguments: object) -> npt.NDArray[np.float64]:
        """Return the predictions for a run or one of its checkpoints, by row."""
        output = self.folder / f"../{uuid.uuid4().hex}.csv"
        main(["predict", *map(str, [of, *arguments]), "--output", str(output)])
        assert not list(output.parent.glob(f".*{output.name}*"))
        rows = list(csv.DictReader(output.read_text().splitlines()))
        assert [int(row["row"]) for row in rows] == list(range(NUM_ROWS))
        return np.array([float(row["probability"]) for row in rows])


def write_clicks(path: Path, seed: int) -> None:
    """Write rows of ten kinds, the same for each seed; clicks hardly depend on them."""
    random = np.random.default_rng(7)
    kinds = [
        (f"{random.normal():.2f}", random.integers(90), f"i{kind % 4}", "|".join("abc"[: kind % 3]))
        for kind in range(10)
    ]
    with path.open("w") as file:
        print("clicked,price,age,item,tags", file=file)
        random = np.random.default_rng(seed)
        for kind in random.integers(10, size=NUM_ROWS):
            print(int(random.random() < 0.4 + 0.02 * kind), *kinds[kind], sep=",", file=file)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Clicks:
    """A run of two trainers with split tables; equal rows are in different positions of batches."""
    folder = tmp_path_factory.mktemp("clicks")
    file = folder / "clicks.csv"
    write_clicks(file, 1)
    write_clicks(folder / "train.csv", 2)
    arguments = settings(
        run={"folder": folder / "run"},
        cluster={"trainers": 2},
        data={
            "format": "csv",
            "path": folder / "train.csv",
            "test_path": file,
            "label": "clicked",
            "dense": ["price", "age"],
            "sparse": ["item", "tags"],
            "multi_hot_separator": "|",
            "cache_folder": folder / "prepared",
        },
        dense={"device": "cpu"},
        embedding={"placement": "row"},
        train={"batch_size": 29, "epochs": 2, "max_steps": LAST, "eval_every_steps": 1},
        checkpoint={"keep_last": 1},
    )
    return Clicks(folder / "run", file, output_of(["launch", *arguments], folder))


def auc_of(labels_N: npt.NDArray[np.int64], scores_N: npt.NDArray[np.float64]) -> float:
    return weighted_auc(labels_N, scores_N, np.ones(len(labels_N)))


def evaluated(of: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines that evaluate prints."""
    capsys.readouterr()
    main(["evaluate", str(of)])
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out.splitlines()


def test_run_evaluate_and_predict_agree(clicks: Clicks, capsys: pytest.CaptureFixture[str]) -> None:
    labels_N, result = clicks.labels, clicks.result
    probabilities_N = clicks.predict(clicks.checkpoint(LAST))
    assert len(set(probabilities_N.tolist())) == 10
    assert result["auc"] == pytest.approx(auc_of(labels_N, probabilities_N), abs=1e-14)
    from_file_N = clicks.predict(clicks.checkpoint(LAST), "--input", clicks.file)
    assert auc_of(labels_N, from_file_N) == auc_of(labels_N, probabilities_N)
    log_loss = -np.log(np.where(labels_N == 1, probabilities_N, 1 - probabilities_N)).mean()
    assert result["log_loss"] == pytest.approx(log_loss, rel=1e-6)
    assert result["calibration"] == pytest.approx(probabilities_N.sum() / labels_N.sum(), rel=1e-6)
    names = ("auc", "log_loss", "normalized_entropy", "calibration", "accuracy", "base_rate")
    assert evaluated(clicks.checkpoint(LAST), capsys) == [
        f"checkpoint          {clicks.checkpoint(LAST)}",
        *(f"{name.replace('_', ' '):<20}{result[name]:.4f}" for name in names),
        f"num samples         {NUM_ROWS}",
        "unknown values      none",
    ]


def test_best_checkpoint_is_reported_and_used(clicks: Clicks, capsys: pytest.CaptureFixture[str]) -> None:
    last, best = clicks.result["auc"], clicks.result["best"]
    assert best["step"] == BEST
    assert best["auc"] > last
    assert sorted(path.name for path in clicks.checkpoint(LAST).parent.iterdir()) == [
        f"step-0000000{step}" for step in (BEST, LAST)
    ]
    for line in (
        f"test AUC            {last:.4f} at step {LAST}\n",
        f"best AUC            {best['auc']:.4f} at step {BEST}",
        f"last checkpoint     {clicks.checkpoint(LAST)} (",
        f"best checkpoint     {clicks.checkpoint(BEST)} (",
    ):
        assert f"\n{line}" in clicks.printed
    first, second, *_ = evaluated(clicks.folder, capsys)
    assert first.startswith(
        f"checkpoint          {clicks.checkpoint(BEST)}, the best (auc {best['auc']:.4f})"
    )
    assert second == f"auc                 {best['auc']:.4f}"
    by_best_N, by_run_N = clicks.predict(clicks.checkpoint(BEST)), clicks.predict(clicks.folder)
    assert (by_best_N == by_run_N).all()
    assert best["auc"] == pytest.approx(auc_of(clicks.labels, by_best_N), abs=1e-14)


def test_documented_code_predicts_the_same_in_plain_pytorch(
    clicks: Clicks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = ROOT / "examples/load_checkpoint.py"
    assert not re.search("(from|import) hybrid", program.read_text())
    new = clicks.folder.parent / "new.csv"
    header, *rows = clicks.file.read_text().splitlines()
    unknown = ["0,0.5,33,other,", "1,,,i1,c", "0,1.5,,,a|other|b", "0,-2,40,i3,other"]
    new.write_text("\n".join([header, *rows[: NUM_ROWS - len(unknown)], *unknown]) + "\n")
    expected_N = clicks.predict(clicks.checkpoint(LAST), "--input", new)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [str(program), str(clicks.checkpoint(LAST)), str(new)])
    runpy.run_path(str(program))
    printed = [line.split(",") for line in capsys.readouterr().out.splitlines()]
    assert [int(row) for row, _ in printed] == list(range(NUM_ROWS))
    assert [float(value) for _, value in printed] == pytest.approx(expected_N.tolist(), rel=1e-5)
    assert len({round(value, 6) for value in expected_N.tolist()}) == 10 + len(unknown)

"""Several tasks, from a configuration to a file of predictions, and early stopping."""

import csv
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.commands import ONE_EACH, code_block, output_of, result_of, settings

from workers.cli import main

NUM_ROWS = 1500
Floats = npt.NDArray[np.float64]


def write_shop(path: Path) -> None:
    """Write clicks, purchases and amounts; clicks depend on the item only."""
    draw = random.Random(1)
    with path.open("w") as file:
        print("user,item,price,importance,clicked,bought,spent,stars", file=file)
        for _ in range(NUM_ROWS):
            item = draw.randrange(10)
            clicked = int(draw.random() < (0.8 if item < 4 else 0.3))
            bought = int(clicked and draw.random() < 0.5)
            spent = f"{3 + item + draw.random():.2f}" if bought else ""  # unknown without a purchase
            values = (f"u{draw.randrange(20)}", f"i{item}", f"{draw.random():.3f}", f"{draw.random():.2f}")
            print(*values, clicked, bought, spent, min(4, item // 2), sep=",", file=file)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a finished run of the documented configuration, and its output."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "shop.toml").write_text(code_block("docs/tasks.md", "toml", "tasks.click"))
    write_shop(folder / "shop.csv")
    changed = settings(
        run={"folder": "run"},
        dense={"device": "cpu"},
        train={"batch_size": 256},
        data={"split": "random(0.3)", "weighted_metrics": "true"},
    )
    return folder, output_of(["launch", "--config", "shop.toml", *ONE_EACH, *changed], folder)


def weighted_auc(labels_N: npt.NDArray[Any], scores_N: Floats, weights_N: Floats) -> float:
    """Return the AUC as the weight of the pairs that are in order, half of it where scores are equal."""
    front, back = labels_N == 1, labels_N == 0
    orders_PM = np.sign(scores_N[front][:, None] - scores_N[back])
    return float(np.average((1 + orders_PM) / 2, weights=np.outer(weights_N[front], weights_N[back])))


def check_weighted_metrics(folder: Path, result: dict[str, Any], last: Path) -> None:
    """Check that metrics have the weights of test rows."""
    columns = ["importance", "clicked", "bought", "stars"]
    main(["predict", str(last), "--output", "test.csv", "--keep", ",".join(columns)])
    rows = list(csv.DictReader((folder / "test.csv").read_text().splitlines()))
    found = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    weights_N, clicked_N = found["importance"], found["clicked"]
    auc = weighted_auc(clicked_N, found["click.probability"], weights_N)
    assert result["click.auc"] == pytest.approx(auc, abs=5e-5)
    right_N = np.where(found["bought"] == 1, found["buy.probability"], 1 - found["buy.probability"])
    bought = -np.average(np.log(right_N), weights=weights_N * clicked_N)
    assert result["buy.log_loss"] == pytest.approx(bought, rel=1e-5)
    stars_NC = np.stack([found[f"stars.probability.{number}"] for number in range(5)], axis=1)
    is_right_N = found["stars"] == stars_NC.argmax(axis=1)
    assert result["stars.accuracy"] == pytest.approx(np.average(is_right_N, weights=weights_N), rel=1e-6)
    plain = weighted_auc(clicked_N, found["click.probability"], np.ones(len(clicked_N)))
    assert abs(result["click.auc"] - plain) > 5e-4


def test_hint_to_resume_raises_the_patience(shop: tuple[Path, str]) -> None:
    (resume,) = [line for line in shop[1].splitlines() if line.startswith("resume")]
    assert resume.endswith("--resume run --set train.patience=4")


def test_each_task_has_metrics_and_predictions(
    shop: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = shop
    monkeypatch.chdir(folder)
    last = sorted((folder / "run/checkpoints").iterdir())[-1]
    main(["evaluate", str(last)])
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert len({line.rindex("  ") + 2 if "  " in line else line.rindex(" ") + 1 for line in lines}) == 1
    printed = dict(line.rsplit(maxsplit=1) for line in lines[1:])
    result = result_of(folder / "run")
    for name in ("click.auc", "click.ndcg@10", "buy.log_loss", "spent.rmse", "stars.accuracy"):
        assert printed[name.replace("_", " ")] == f"{result[name]:.4f}"
    assert result["buy.num_samples"] < result["click.num_samples"]
    assert result["stars.accuracy"] > 0.3  # 0.2 by chance
    check_weighted_metrics(folder, result, last)
    main(["predict", str(last), "--input", "shop.csv", "--output", "p.csv"])
    rows = list(csv.DictReader(Path("p.csv").read_text().splitlines()))
    assert len(rows) == NUM_ROWS
    stars = [f"stars.probability.{number}" for number in range(5)]
    assert list(rows[0]) == ["row", "click.probability", "buy.probability", "spent.value", *stars]
    assert sum(float(rows[0][name]) for name in stars) == pytest.approx(1)

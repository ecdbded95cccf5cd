"""The examples of models: each trains and reaches the scores of docs/models.md."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from support.choices import write_choices
from support.commands import ROOT, code_block, output_of, settings
from support.trained import write_shop

EXAMPLES = ROOT / "examples"
PROGRAMS = ("apply_deltas", "drifting_log", "stream_days", "train_every_day")  # which other tests run
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text())
NAMES = [*(name for name in NAMES if name not in PROGRAMS), "hstu"]
ON_A_CLICK_LOG = {path.stem for path in EXAMPLES.glob("*.py") if "click_log" in path.read_text()}
CENSUS = [ROOT.parent / "shared/data/adult" / name for name in ("adult.data.gz", "adult.test.gz")]
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in (ROOT / "docs/models.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("|")
]
needs_census = pytest.mark.skipif(
    not all(path.exists() for path in CENSUS), reason=f"real data not here: {', '.join(map(str, CENSUS))}"
)


def scores_of(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[float]:
    """Run an example in this process; return each score that it prints, followed by the best possible one."""
    file, options = ("self_attention", ["--hstu"]) if name == "hstu" else (name, [])
    script = str(EXAMPLES / f"{file}.py")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [script, *options, *arguments])
    runpy.run_path(script, run_name="__main__")
    return [float(number) for number in re.findall(r"\b[01]\.\d{4}\b", capsys.readouterr().out)]


def row_of(name: str) -> list[str]:
    (row,) = [row for row in ROWS if row[0].startswith(f"`{name}.")]
    return row


@pytest.mark.parametrize("name", NAMES)
def test_each_example_trains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if name in ON_A_CLICK_LOG:
        small = "[data]\nsynthetic_rows = 2000\n[train]\nbatch_size = 200\n"
        Path("small.toml").write_text(small)
        arguments = ["--config", "small.toml"]
    else:
        arguments = ["--samples", "2000", "--test-samples", "2000", "--epochs", "1"]
    found = scores_of(name, arguments, monkeypatch, capsys)
    assert len(found) == len(re.findall(r"\b[01]\.\d{4}\b", " ".join(row_of(name))))
    assert all(score < best for score, best in zip(found[::2], found[1::2], strict=True))


@needs_census
def test_mmoe_learns_two_labels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    income, never_married = scores_of(
        "mmoe", ["--epochs", "1", "--census", *map(str, CENSUS)], monkeypatch, capsys
    )
    assert min(income, never_married) > 0.8


def test_page_lists_every_model() -> None:
    shared = {"__init__", "dense_net", "layers"}
    models = {path.stem for path in (ROOT / "hybrid/models").glob("*.py")} - shared
    assert set(NAMES) == models
    assert all(row_of(name) for name in models)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_example_reaches_the_score_of_the_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    scores = [float(number) for number in re.findall(r"\b[01]\.\d{4}\b", " ".join(row_of(name)))]
    assert scores_of(name, [], monkeypatch, capsys) == pytest.approx(scores, abs=0.003)


@pytest.mark.long
@pytest.mark.parametrize(("update", "drawn"), [("lookahead", 0), ("lookahead", 64)])
def test_example_on_a_cluster_equals_one_process(update: str, drawn: int, tmp_path: Path) -> None:
    """The loss of the two towers depends on the items of all trainers, or on negatives of the step."""
    script = EXAMPLES / "two_towers.py"
    options = ["--steps", "5", "--dtype", "float64", "--set", f"train.update={update}"]
    arguments = ["--samples", "5000", "--double", "--drawn", str(drawn)]
    output_of(["compare", script, *options, "--", *arguments], tmp_path)  # fails if they differ


@pytest.mark.long
def test_history_and_retrieval_models_of_the_page_equal_one_process(tmp_path: Path) -> None:
    """The command fails if results differ."""
    write_shop(tmp_path / "clicks.csv", 400)
    write_choices(tmp_path / "choices.csv")
    changed = settings(train={"batch_size": 100, "update": "lookahead"}, columns={"seen.max_ids": 3})
    for name, kind, more in (("clicks", "history", changed), ("choices", "retrieval", [])):
        (tmp_path / f"{name}.toml").write_text(code_block("docs/models.md", "toml", kind))
        workers = settings(cluster={"workers": 1})
        output_of(["compare", "--steps", "5", *workers, "--config", f"{name}.toml", *more], tmp_path)

"""Runs of one configuration with several seeds, by ``hybrid launch --seeds``."""

import json
import signal
import statistics
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.commands import ONE_EACH, TrainedRun, output_of, refusal, result_of, run, settings, started

METRICS = ("auc", "log_loss", "normalized_entropy", "calibration")
STOP_SECONDS = 10.0
RUN = settings(run={"folder": "run"})


def folders(*seeds: int) -> list[str]:
    return [f"run/seed-{seed}" for seed in seeds]


def test_interrupted_runs_continue(endless: list[str], tmp_path: Path) -> None:
    """The first run continues, the others start; afterwards, nothing is left to do."""
    job = ["launch", *endless, *ONE_EACH, *RUN]
    with started([*job, "--seeds", "2"], tmp_path) as command:
        command.await_text("\nstep 3/")
        command.process.send_signal(signal.SIGTERM)
        ended = command.wait(STOP_SECONDS)
    assert ended.code == 143
    assert ended.stderr.count("\n") == 1
    assert "--resume auto" in ended.stderr
    (saved,) = (tmp_path / "run/seed-1/checkpoints").iterdir()
    step = int(saved.name.removeprefix("step-")) + 2
    again = [*job, *settings(train={"max_steps": step}), "--seeds", "2"]
    assert "run.folder" in run(again, tmp_path).stderr
    again += ["--resume", "auto"]
    ended = run([*again, "--json"], tmp_path)
    assert ended.code == 0
    assert f"\nresuming from step {step - 2}: run/seed-1/" in ended.stderr
    assert "; starting run/seed-2\n" in ended.stderr
    results = [(tmp_path / folder / "result.json").read_bytes() for folder in folders(1, 2)]
    check_results(tmp_path, json.loads(ended.stdout), ended.stderr, step)
    finished = output_of(again, tmp_path)
    for folder in folders(1, 2):
        assert f"{folder} has finished" in finished
    assert ended.stderr.endswith(finished[finished.index("\nmean and ") :])
    assert results == [(tmp_path / folder / "result.json").read_bytes() for folder in folders(1, 2)]


def check_results(folder: Path, printed: dict[str, Any], text: str, step: int) -> None:
    """Check that each seed has a run that ended after a step, and that metrics are shown with their mean."""
    results = [result_of(folder / each) for each in folders(1, 2)]
    assert [each["steps"] for each in results] == [step, step]
    assert printed["runs"] == dict(zip(folders(1, 2), results, strict=True))
    configs = [tomllib.loads((folder / each / "config.toml").read_text()) for each in folders(1, 2)]
    assert [config["run"]["seed"] for config in configs] == [1, 2]
    assert results[0]["auc"] != results[1]["auc"]
    assert list(printed["metrics"]) == [*METRICS]
    for name, found in printed["metrics"].items():
        values = [result[name] for result in results]
        assert found["mean"] == pytest.approx(sum(values) / 2)
        assert found["deviation"] == pytest.approx(statistics.stdev(values))
    auc = printed["metrics"]["auc"]
    assert f"\nAUC                 {auc['mean']:.4f} ± {auc['deviation']:.4f}\n" in text


def test_result_of_one_run_is_printed_as_json(trained: TrainedRun, tmp_path: Path) -> None:
    folder = trained.copy(tmp_path)
    again = settings(run={"folder": f"'{folder}'"}, checkpoint={"every_steps": 5})
    printed = run(["launch", *trained.settings, *again, "--resume", "auto", "--json"], tmp_path).stdout
    assert json.loads(printed) == {"runs": {str(folder): result_of(folder)}}
    (folder / "result.json").write_text("{")
    assert str(folder / "result.json") in refusal(
        "launch", *trained.settings, *again, "--resume", "auto", "--json"
    )


def test_run_of_a_later_seed_is_found_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/seed-8").mkdir(parents=True)
    (tmp_path / "run/seed-8/metrics.jsonl").touch()
    line = refusal("launch", *RUN, "--seeds", "2", "--set", "run.seed=7")
    assert line.startswith("hybrid launch: run.folder = 'run/seed-8': ")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["seed-8"]

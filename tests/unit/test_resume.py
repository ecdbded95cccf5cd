"""Which run goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hybrid.config import RunConfig
from hybrid.errors import ConfigError
from workers.launching.resume import check_same_model, resumed_config, unfinished_run
from workers.paths import run_path


def config(name: str = "run", folder: str = "") -> RunConfig:
    whole = RunConfig()
    return whole.replace(run=dataclasses.replace(whole.run, name=name, folder=folder))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_run(name: str, *, is_finished: bool = False) -> Path:
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    if is_finished:
        (folder / "result.json").touch()
    return folder


def test_the_newest_run_of_the_name_that_has_not_finished_goes_on() -> None:
    make_run("click-20260101-235959")
    wanted = make_run("click-20260102-000000.10")
    make_run("click-20260102-000000.9")
    make_run("click-20260103-000000", is_finished=True)
    for other in (
        "click-through-20260104-000000",
        "clic-20260104-000000",
        "click-best",
        "xclick-20260104-000000",
    ):
        make_run(other)
    assert unfinished_run(config(name="click")) == wanted


def test_without_such_a_run_there_is_none() -> None:
    assert unfinished_run(config(name="click")) is None
    make_run("click-20260103-000000", is_finished=True)
    (Path("runs") / "click-20260104-000000/logs").mkdir(parents=True)  # failed before its first step
    assert unfinished_run(config(name="click")) is None


def test_a_name_is_no_pattern() -> None:
    make_run("axb-20260101-000000")
    assert unfinished_run(config(name="a.b")) is None
    assert unfinished_run(config(name="a*")) is None


def test_the_folder_of_a_run_is_found_by_its_name() -> None:
    folder = run_path(config(name="click"))
    folder.mkdir(parents=True)
    second = run_path(config(name="click"))
    for run in (folder, second):
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.toml").touch()
    assert unfinished_run(config(name="click")) == second


def test_a_folder_that_was_chosen_is_the_only_one() -> None:
    make_run("run-20260101-000000")
    chosen = config(folder="chosen")
    assert unfinished_run(chosen) is None
    Path("chosen").mkdir()
    Path("chosen/config.toml").touch()
    assert unfinished_run(chosen) == Path("chosen")
    Path("chosen/result.json").touch()
    assert unfinished_run(chosen) is None


def test_a_run_goes_on_with_the_same_model_only() -> None:
    run = make_run("run-20260101-000000")
    (run / "config.toml").write_text("[embedding]\ndim = 12\n[train]\nepochs = 2\n")
    same = resumed_config(run, ["train.epochs=3"])
    assert (same.embedding.dim, same.train.epochs) == (12, 3)
    check_same_model(run, same)
    with pytest.raises(ConfigError, match=r"embedding.dim = 16: the run to resume has 12; keep that"):
        check_same_model(run, RunConfig())


def test_what_is_no_run_does_not_go_on() -> None:
    with pytest.raises(ConfigError, match=r"--resume = 'nothing': holds no run"):
        resumed_config(Path("nothing"), [])

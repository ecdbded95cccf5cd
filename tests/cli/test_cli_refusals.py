"""What is refused before anything starts: one line that names the key or the file, and nothing touched.

A subprocess would show nothing more, so these call the command's ``main`` here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import free_port, settings

from workers.cli import main


def refused(*arguments: object) -> str:
    """The one line with which a command refuses."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert isinstance(end.value.code, str), "a message means exit code 1"
    assert "\n" not in end.value.code
    return end.value.code


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_wrong_setting() -> None:
    line = refused("launch", "--set", "train.epoch=3")
    assert line == "hybrid launch: train.epoch: no such key; did you mean train.epochs?"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.update=async",
            "train.update = 'async': must be sync or pipelined: what async comes to depends on who is quick",
        ),
        (
            "embedding.wire_dtype=bfloat16",
            "embedding.wire_dtype = 'bfloat16': must be rows: one process sends nothing, and rounds nothing",
        ),
    ],
)
def test_comparing_what_one_process_cannot_do(override: str, message: str) -> None:
    assert refused("compare", "--set", override) == f"hybrid compare: {message}"


def test_a_wrong_file(tmp_path: Path) -> None:
    line = refused("launch", "--config", tmp_path / "run.toml")
    rule = "cannot read the configuration: No such file or directory"
    assert line == f"hybrid launch: {tmp_path}/run.toml: {rule}"


def test_a_bad_row_where_it_is_fatal(tmp_path: Path) -> None:
    """The command prepares the data and starts nothing."""
    path = tmp_path / "rows.csv"
    path.write_text("label,x,c\n1,0.5,v0\n2,1.5,v1\n")
    data = {"format": "csv", "path": path, "dense": "x", "sparse": "c", "bad_rows": "fail"}
    line = refused("plan", *settings(data={**data, "cache_folder": tmp_path / "cache"}))
    assert line == (
        f"hybrid plan: {path}:3: label is '2', expected '1' or '0'; set data.positive_labels and "
        "data.negative_labels, or skip such rows with data.bad_rows = skip"
    )


@pytest.mark.parametrize("command", [("launch",), ("master",)], ids=" ".join)
def test_a_folder_that_holds_a_run(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("precious\n")
    before = snapshot(tmp_path)
    overrides = settings(run={"folder": tmp_path}, cluster={"master_port": free_port()})
    line = refused(*command, *overrides)
    assert line == (
        f"hybrid {command[0]}: run.folder = '{tmp_path}': holds a run already; choose another, or remove it"
    )
    assert snapshot(tmp_path) == before


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, rule in (("file", "is a file"), ("file/run", "cannot be made: Not a directory")):
        line = refused("launch", *settings(run={"folder": tmp_path / folder}))
        assert line == f"hybrid launch: run.folder = '{tmp_path}/{folder}': {rule}; choose another"


@pytest.mark.parametrize(
    ("override", "kept"),
    [("dense.top_mlp=[8]", "[16, 4]"), ("embedding.dim=8", "12"), ("train.batch_size=64", "32")],
)
def test_another_model_than_the_run_to_resume(override: str, kept: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    config = "[dense]\ntop_mlp = [16, 4]\n[embedding]\ndim = 12\n[train]\nbatch_size = 32\n"
    (tmp_path / "config.toml").write_text(config)
    before = snapshot(tmp_path)
    line = refused("launch", "--resume", tmp_path, "--set", override)
    rule = f"the run to resume has {kept}; keep that, or start a new run"
    assert line == f"hybrid launch: {override.replace('=', ' = ')}: {rule}"
    assert snapshot(tmp_path) == before


def test_resuming_what_is_no_run(tmp_path: Path) -> None:
    line = refused("launch", "--resume", tmp_path / "nothing")
    assert line == f"hybrid launch: --resume = '{tmp_path}/nothing': holds no run"
    line = refused("launch", "--resume", tmp_path, "--config", "any.toml")
    assert line == (
        "hybrid launch: --resume: goes on with the configuration of its run; use --set to change keys"
    )


@pytest.mark.parametrize("command", [["evaluate"], ["predict", "--output", "predictions.csv"]], ids=" ".join)
def test_using_a_folder_without_a_checkpoint(command: list[str], tmp_path: Path) -> None:
    line = refused(*command, tmp_path)
    assert line == f"hybrid {command[0]}: {tmp_path}: there is no checkpoint here"


def test_predictions_overwrite_nothing(tmp_path: Path) -> None:
    (tmp_path / "out.csv").write_text("precious\n")
    before = snapshot(tmp_path)
    line = refused("predict", tmp_path, "--output", tmp_path / "out.csv")
    assert line == (
        f"hybrid predict: {tmp_path}/out.csv: exists already; choose another --output, or remove it"
    )
    assert snapshot(tmp_path) == before


@pytest.mark.upstream("dist_autograd/_do_test")
def test_a_role_by_hand_that_has_no_place() -> None:
    port = settings(cluster={"master_port": free_port()})
    line = refused("trainer", "--index", "2", *port)
    assert line == (
        "hybrid trainer 2: --index: there is no trainer 2 in a cluster of 1 master, 2 trainer(s), 2 worker(s)"
    )
    assert refused("worker", "--index", "-1", *port).startswith(
        "hybrid worker -1: --index: there is no worker"
    )
    line = refused("worker", "--index", "0")
    assert line == (
        "hybrid worker 0: cluster.master_port: must be set, the same for every role started by hand"
    )

"""What is refused before anything starts: one line that names the key or the file, and nothing touched.

A subprocess would show nothing more, so these call the command's ``main`` here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import free_port, settings

from workers.cli import main

GOOD = [f"{i % 2},{i}.5,v{i % 3}" for i in range(40)]


def refused(*arguments: object) -> str:
    """The one line with which a command refuses."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert isinstance(end.value.code, str), "a message means exit code 1"
    assert "\n" not in end.value.code
    return end.value.code


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epoch=3", "train.epoch: no such key; did you mean train.epochs?"),
        ("train.epochs=many", "train.epochs = 'many': must be an integer, at least 1"),
        (
            "dense.net=dlmr",
            "dense.net = 'dlmr': must be one of dlrm, dcn_v2, deepfm, wide_deep, or module:function",
        ),
    ],
)
def test_a_wrong_setting(override: str, message: str) -> None:
    assert refused("launch", "--set", override) == f"hybrid launch: {message}"


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nepoch = 3", "{path}: train.epoch: no such key; did you mean train.epochs?"),
        ("[train]\nepochs = 0", "train.epochs = 0: must be an integer, at least 1"),
        ("[train]\nepochs = ", "{path}: is not valid TOML: Invalid value (at end of document)"),
        (None, "{path}: cannot read the configuration: No such file or directory"),
    ],
)
def test_a_wrong_file(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    if text is not None:
        path.write_text(text)
    assert refused("launch", "--config", path) == f"hybrid launch: {message.format(path=path)}"


def _csv(tmp_path: Path, rows: list[str], header: str = "label,x,c") -> list[str]:
    """Settings of a job on a file of these rows, for a command that prepares the data and starts nothing."""
    path = tmp_path / "rows.csv"
    path.write_text("".join(f"{line}\n" for line in [header, *rows] if line))
    return settings(
        data={"format": "csv", "path": path, "dense": "x", "sparse": "c", "cache_folder": tmp_path / "cache"}
    )


BAD_ROWS = {
    "width": (
        [row.rpartition(",")[0] for row in GOOD],
        "{path}: no row can be used, 40 of 40 as line 2: 2 columns, expected 3; check data.columns and "
        "data.delimiter",
    ),
    "labels": (
        [f"yes{row[1:]}" for row in GOOD],
        "{path}: no row can be used, 40 of 40 as line 2: label is 'yes', expected '1' or '0'; set "
        "data.positive_labels and data.negative_labels",
    ),
    "no rows": ([], "no row is left to train on; check data.path and data.test_fraction"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_file_without_a_usable_row(kind: str, tmp_path: Path) -> None:
    rows, message = BAD_ROWS[kind]
    line = refused("plan", *_csv(tmp_path, rows))
    assert line == f"hybrid plan: {message.format(path=tmp_path / 'rows.csv')}"


def test_an_empty_file(tmp_path: Path) -> None:
    line = refused("plan", *_csv(tmp_path, [], header=""))
    assert line == (
        f"hybrid plan: {tmp_path}/rows.csv: the file is empty, expected a header line; check data.path"
    )


def test_one_bad_row_where_it_is_fatal(tmp_path: Path) -> None:
    rows = [*GOOD[:7], "2,7.5,v1", *GOOD[8:]]
    line = refused("plan", *_csv(tmp_path, rows), *settings(data={"bad_rows": "fail"}))
    assert line == (
        f"hybrid plan: {tmp_path}/rows.csv:9: label is '2', expected '1' or '0'; set data.positive_labels "
        "and data.negative_labels, or skip such rows with data.bad_rows = skip"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.path=nowhere.csv", "nowhere.csv: no such file or folder; check data.path"),
        ("data.test_path=nowhere.csv", "nowhere.csv: no such file or folder; check data.test_path"),
        ("data.dense=xx", "data.dense = 'xx': {path} has no such column; did you mean 'x'?"),
        ("data.sparse=cc", "data.sparse = 'cc': {path} has no such column; did you mean 'c'?"),
        ("data.label=labels", "data.label = 'labels': {path} has no such column; did you mean 'label'?"),
    ],
)
def test_a_file_or_column_that_is_not_there(override: str, message: str, tmp_path: Path) -> None:
    line = refused("plan", *_csv(tmp_path, GOOD), "--set", override)
    assert line == f"hybrid plan: {message.format(path=tmp_path / 'rows.csv')}"


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

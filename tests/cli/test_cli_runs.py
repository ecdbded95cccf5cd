"""Runs from start to end by the real commands: launched, by hand, resumed and evaluated."""

import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos_run.run_comparison import differences
from support.commands import ONE_EACH, OTHERS, TrainedRun, by_hand, output_of, result_of, run, settings
from support.stopped_runs import saved_steps
from support.traces import slices

from hybrid.checkpoint.checkpoint_folders import MANIFEST_FILE, Manifest, list_checkpoints, write_text
from hybrid.data.dataset.dataset_manifest import COPY_NAME, FORMAT_VERSION
from hybrid.data.parse.column_layout import CRITEO_DENSE, CRITEO_SPARSE
from workers.cli import main


def logged_steps(folder: Path) -> list[int]:
    """Return the steps in the log of a run."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["kind"] == "train"]


def test_run_folder_has_all_files(trained: TrainedRun) -> None:
    names = {path.name.partition(".tfevents")[0] for path in trained.folder.iterdir()}
    assert names == {
        *("config.toml", "versions.json", "metrics.jsonl", "result.json", "report.html", "events.out"),
        *("checkpoints", "vocabularies", "logs"),
    }
    assert saved_steps(trained.folder) == [16, 15]
    assert {path.stem for path in (trained.folder / "logs").iterdir()} == {
        *("master", "trainer-0", "trainer-1", "worker-0", "worker-1")
    }
    assert logged_steps(trained.folder) == list(range(1, 17))
    outcome = result_of(trained.folder)
    assert (outcome["steps"], outcome["num_samples"], outcome["bad_rows"]) == (16, 333, 0)
    assert f"test AUC            {outcome['auc']:.4f} at step 16 (best reachable" in trained.printed
    assert outcome["best"] == {"step": 16, "auc": outcome["auc"]}
    for command in ("evaluate", "launch --resume", "predict"):
        assert f" {command} '{trained.folder}'" in trained.printed, "quoted for a shell"


def test_results_are_printed_as_json(trained: TrainedRun, tmp_path: Path) -> None:
    metrics = {name: result_of(trained.folder)[name] for name in ("auc", "log_loss")}

    def printed(*command: object) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(run([*command, "--json"], tmp_path).stdout)
        return result

    evaluated = printed("evaluate", trained.folder)
    assert evaluated["metrics"] == pytest.approx(evaluated["metrics"] | metrics)
    checkpoint, output = str(list_checkpoints(trained.folder)[0]), tmp_path / "predictions.csv"
    predicted = printed("predict", trained.folder, "--output", output)
    assert predicted["output"] == str(output)
    for summary in (evaluated, predicted):
        assert (summary["checkpoint"], summary["num_rows"]) == (checkpoint, 333)
    assert "--json" in run(["predict", trained.folder, "--json"], tmp_path).stderr
    planned = printed("plan")
    assert planned["tables"]["C1"].keys() == {"rows", "dim", "bytes", "workers"}
    assert planned["transfers"]["trainer -> worker"]["messages"] == 2 * 2 * 2
    assert 0 < planned["worker_bytes"] < planned["host_bytes"]
    assert planned["is_sufficient"] is True


def test_finished_run_is_not_changed(trained: TrainedRun, tmp_path: Path) -> None:
    folder = trained.copy(tmp_path)
    ended = run(["launch", "--resume", folder, *ONE_EACH], tmp_path)
    assert ended.code == 1
    assert re.fullmatch(r"hybrid launch: train.epochs: .* 16 steps; .*\n", ended.stderr)
    for name in ("config.toml", "metrics.jsonl", "result.json"):
        assert (folder / name).read_bytes() == (trained.folder / name).read_bytes()


ALL_ROLES = [["master"], *([kind, "--index", i] for kind in ("trainer", "worker") for i in "01")]


def test_roles_by_hand_have_the_bits_of_launch(trained: TrainedRun, tmp_path: Path) -> None:
    relative = settings(run={"folder": "run"}, data={"cache_folder": "prepared"})
    with by_hand(ALL_ROLES, [*trained.settings, *relative], tmp_path) as commands:
        endings = [command.wait() for command in commands]
    assert [(ended.code, ended.stderr) for ended in endings] == [(0, "")] * 5
    assert differences(trained.folder, tmp_path / "run") == []
    assert {path.suffix for path in (tmp_path / OTHERS).iterdir()} == {".out", ".err"}


def check_profile(folder: Path, printed: str) -> None:
    """Check the profile of steps 5 to 7 of a run with two trainers and two workers."""
    by_role = slices(json.loads((folder / "profile/trace.json").read_text()))
    assert list(by_role) == ["trainer 0", "trainer 1", "worker 0", "worker 1"]
    for role, events in by_role.items():
        spans = {"pool", "merge", "apply"} if role.startswith("worker") else {"step", "lookup", "all-reduce"}
        for step in (5, 6, 7):
            assert {each["name"] for each in events if each["args"]["step"] == step} >= spans, role
        assert {event["args"]["step"] for event in events} == {5, 6, 7}
    assert "## worker 1" in (folder / "profile/table.md").read_text()
    assert f"profile             {folder / 'profile'}\n" in printed


CUSTOM_NET = """
from hybrid.dense.net_builder import build_dense_net

def build(config, input_spec, widths):
    return build_dense_net(config.replace(dense=type(config.dense)()), input_spec, widths)
"""


def check_changed_input(folder: Path, path: Path) -> None:
    """Respelled values are reported as unknown; changed labels in the files of a run are refused."""
    text = path.read_text()
    path.write_text(re.sub(r",u(\d)", r",U\1", text))
    ended = run(["evaluate", folder, "--input", path, "--json"], path.parent)
    assert "of user (0% expected)" in ended.stderr
    summary = json.loads(ended.stdout)
    assert (summary["num_rows"], summary["bad_rows"]) == (400, 1)
    assert summary["unknown_values"]["item"] < 0.5 < summary["unknown_values"]["user"]
    other = {"1": "0", "0": "1"}
    path.write_text(
        "".join(other.get(line[0], line[0]) + line[1:] for line in text.splitlines(keepends=True))
    )
    with pytest.raises(SystemExit, match=rf"^hybrid evaluate: {path}: .*--input$"):
        main(["evaluate", str(folder)])
    ended = run(["launch", "--resume", folder, "--set", "train.epochs=5"], path.parent)
    assert ended.code == 1
    assert re.fullmatch(f"hybrid launch: {path}: .*\n", ended.stderr)


def check_data_of_another_version(of: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose data were prepared by another version is evaluated on given files, and is not resumed."""
    folder = Path(shutil.copytree(of, of.with_name("earlier")))
    evaluate = ["evaluate", str(folder), "--input", str(path)]
    main(evaluate)
    expected = capsys.readouterr().out
    for checkpoint in list_checkpoints(folder):
        data = json.loads((checkpoint / COPY_NAME).read_text()) | {"format": FORMAT_VERSION - 1}
        listed = Manifest.read(checkpoint / MANIFEST_FILE)
        listed.files.update(write_text(checkpoint, COPY_NAME, json.dumps(data)))
        listed.write(checkpoint)
    main(evaluate)
    assert capsys.readouterr().out == expected
    place = rf"{folder}/checkpoints/step-\d+/data.json: "
    with pytest.raises(SystemExit, match=rf"^hybrid evaluate: {place}.*--input$"):
        main(evaluate[:2])
    ended = run(["launch", "--resume", folder, "--set", "train.epochs=5"], path.parent)
    assert ended.code == 1
    assert re.fullmatch(f"hybrid launch: {place}.*\n", ended.stderr)


def clicks(num_rows: int) -> list[tuple[int, float, str, str]]:
    """Return rows of label, x, user and item; the label depends on x and the user."""
    random = np.random.default_rng(1)
    x, user = random.normal(size=num_rows), random.integers(9, size=num_rows)
    item = random.integers(50, size=num_rows)
    label = (x + (user % 3) + random.normal(size=num_rows) > 1).astype(int)
    return [
        (int(y), round(float(v), 3), f"u{u}", f"i{i}")
        for y, v, u, i in zip(label, x, user, item, strict=True)
    ]


def write_csv(path: Path, num_rows: int) -> Path:
    """Write a CSV with a header; line 4 has an invalid label."""
    lines = [",".join(map(str, row)) for row in clicks(num_rows)]
    path.write_text("\n".join(["label,x,user,item", *lines[:2], "maybe,0.5,u1,i1", *lines[2:]]) + "\n")
    return path


def write_criteo(path: Path, num_rows: int) -> Path:
    """Write a gzip file in Criteo's layout, with missing values."""
    with gzip.open(path, "wt") as file:
        for label, x, user, item in clicks(num_rows):
            dense = [str(round(10 * x)), *[""] * (len(CRITEO_DENSE) - 1)]
            sparse = [user, item, *["same"] * (len(CRITEO_SPARSE) - 2)]
            file.write("\t".join([str(label), *dense, *sparse]) + "\n")
    return path


@pytest.mark.parametrize(
    ("name", "write", "sections"),
    [
        (
            "clicks.csv",
            write_csv,
            {
                "data": {"format": "csv", "dense": "x", "sparse": ["user", "item"]},
                "dense": {"net": "custom_net:build"},
                "cluster": {"trainers": 1, "workers": 1},
            },
        ),
        (
            "clicks.tsv.gz",
            write_criteo,
            {
                "data": {"format": "criteo"},
                "dense": {"net": "dcn_v2", "ddp": "inside", "remote_mlp": [32]},
                "embedding": {"placement": "row"},
                "profile": {"steps": [3, 5]},
            },
        ),
    ],
    ids=["csv", "criteo"],
)
def test_text_files_train_a_model(
    name: str,
    write: Callable[[Path, int], Path],
    sections: dict[str, dict[str, object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "custom_net.py").write_text(CUSTOM_NET)
    path = write(tmp_path / name, 400)
    sections["data"] |= {"path": path, "cache_folder": tmp_path / "cache"}
    sections["train"] = sections.get("train", {}) | {"batch_size": 64, "epochs": 3}
    folder = tmp_path / "run"
    launched = output_of(["launch", *settings(run={"folder": folder}, **sections)], tmp_path)
    assert result_of(folder)["auc"] > 0.6
    assert result_of(folder)["bad_rows"] == (name == "clicks.csv")
    if "profile" in sections:
        check_profile(folder, launched)
    if name == "clicks.csv":
        assert "skipped 1 invalid row(s): 1 unknown label" in launched
        assert f"  {path}:4: label is 'maybe', expected '1' or '0'\n" in launched
    monkeypatch.syspath_prepend(tmp_path)  # commands import custom nets from their current folder
    main(["evaluate", str(folder), "--input", str(path)])
    printed = capsys.readouterr().out
    assert "num samples         400\n" in printed
    assert re.search(r"^unknown values      (none|item \d)", printed, re.MULTILINE)
    if name == "clicks.csv":
        assert re.search(r"^unknown values      (none|item \d)", launched, re.MULTILINE)
        check_data_of_another_version(folder, path, capsys)
        check_changed_input(folder, path)

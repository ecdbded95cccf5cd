"""Commands on what lies in a store: a run, its input, and what they write, as with the same on a disk."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import output_of, settings
from support.stores import BUCKET, Proxy, Store, sent
from support.trained import clicks_config, write_clicks, write_trained

import hybrid
from hybrid.checkpoint.checkpoint_folders import step_folder
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.storage import files
from hybrid.storage.remote_path import RemotePath, StoragePath
from workers.cli import main

THERE = RemotePath(f"s3://{BUCKET}", "commands")
CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to credentials that may do this"
)
PAIR = ["--map", "user.weight=user"]


@dataclass(frozen=True)
class Twins:
    """A folder with a run, new rows, and a table for it, ``rows.safetensors``; and the same in a store."""

    here: Path

    def both(self) -> Iterator[StoragePath]:
        yield self.here
        yield THERE


@pytest.fixture(scope="module")
def twins(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    here = tmp_path_factory.mktemp("here")
    write_clicks(here / "new.csv", 60, seed=8)
    write_trained(here / "run", clicks_config(here))
    num_rows, dim, _ = Checkpoint.open(step_folder(here / "run", 1)).manifest.tables["user"]
    save_file({"user.weight": torch.randn(num_rows, dim)}, here / "rows.safetensors")
    sent(here, THERE)
    # The run there has read its rows there, too.
    away = tmp_path_factory.mktemp("away")
    config = clicks_config(away, data={"path": str(THERE / "clicks.csv")})
    files.remove(THERE / "run")
    sent(write_trained(away / "run", config), THERE / "run")
    return Twins(here)


def said(capsys: pytest.CaptureFixture[str], folder: StoragePath) -> str:
    """What was printed, whichever of the two folders it was of."""
    return capsys.readouterr().out.replace(str(folder), "FOLDER")


def refused(*arguments: object) -> str:
    """The line with which a command ends."""
    with pytest.raises(SystemExit) as end:
        main([str(each) for each in arguments])
    line = str(end.value.code)
    assert "\n" not in line
    return line


def content_of(folder: StoragePath) -> dict[str, bytes]:
    return {each.path.name: files.read_bytes(each.path) for each in files.list_entries(folder, is_deep=True)}


@pytest.mark.parametrize("name", [pytest.param("p.csv", marks=pytest.mark.long), "p.parquet"])
def test_predictions(twins: Twins, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for folder in twins.both():
        output = folder / name
        rows = ["--input", str(folder / "new.csv"), "--keep", "user,tags"]
        main(["predict", *rows, "--output", str(output), str(folder / "run")])
        found.append((said(capsys, folder), files.read_bytes(output)))
        assert "exists already; choose another --output" in refused(
            "predict", *rows, "--output", output, folder / "run"
        )
    assert found[0][0].startswith(f"wrote 60 predictions to FOLDER/{name}; checkpoint: FOLDER/run/checkp")
    assert found[1] == found[0]


@pytest.mark.parametrize("rows", [pytest.param([], marks=pytest.mark.long), ["new.csv"]])
def test_metrics(twins: Twins, rows: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for folder in twins.both():
        main(["evaluate", str(folder / "run"), *(f"--input={folder / name}" for name in rows)])
        found.append(said(capsys, folder))
    assert re.search(r"\nauc +0\.\d{4}\n", found[0])
    assert found[1] == found[0]


def test_an_export(twins: Twins, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for folder in twins.both():
        main(["export", str(folder / "run"), "--output", str(folder / "served"), "--format", "tables"])
        found.append((said(capsys, folder), content_of(folder / "served")))
    assert found[0][1].keys() == {"preprocessing.json", "tables.safetensors"}
    assert found[1] == found[0]


def test_an_export_is_whole_or_not_at_all(
    twins: Twins, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last file is that without which the others are no use; where it is refused, none is left."""
    with Proxy(store) as proxy:
        proxy.plan = lambda method, path: "403" if "preprocessing" in path and method == "PUT" else None
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{proxy.address}")
        line = refused("export", THERE / "run", "--output", THERE / "no", "--format", "tables")
        sent_files = [path for method, path in proxy.seen if method == "PUT" and "." in path]
    assert line.startswith(f"hybrid export: {THERE / 'no'}: cannot be written: ")
    assert line.endswith(CREDENTIALS)
    assert ["preprocessing" in path for path in sent_files] == [False, True]
    assert not files.exists(THERE / "no")


def test_an_import(twins: Twins, capsys: pytest.CaptureFixture[str]) -> None:
    run, warm = THERE / "run", THERE / "warm"
    main(["import", f"{THERE}/rows.safetensors", "--into", str(run), "--output", str(warm), *PAIR])
    said = capsys.readouterr().out
    assert said.startswith("table               user: ")
    assert f"wrote               {warm}/checkpoints/step-00000001" in said
    before, model = hybrid.load(str(twins.here / "run")), hybrid.load(str(warm))
    assert torch.equal(model.rows("user"), load_file(twins.here / "rows.safetensors")["user.weight"])
    assert torch.equal(model.rows("item"), before.rows("item"))
    assert files.read_bytes(warm / "config.toml") == files.read_bytes(run / "config.toml")


@pytest.mark.long
def test_an_import_that_is_refused_leaves_nothing(
    twins: Twins, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(store) as proxy:
        proxy.plan = lambda method, path: "403" if "dense" in path and method == "PUT" else None
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{proxy.address}")
        source, output = THERE / "rows.safetensors", THERE / "no"
        line = refused("import", source, "--into", THERE / "run", "--output", output, *PAIR)
    assert line.startswith(f"hybrid import: cannot write {output}/")
    assert line.endswith(CREDENTIALS)
    assert not files.exists(output)


def test_a_loaded_model(twins: Twins) -> None:
    rows = {"price": [9.5], "age": [30], "user": ["u7"], "item": ["i1"], "tags": [["a", "b"]]}
    found = []
    for folder in twins.both():
        model = hybrid.load(str(folder / "run"))
        found.append(model(model.encode(rows))["probability"].tolist())
    assert found[1] == found[0]


NEW = THERE / "new.csv"
NO_BUCKET = RemotePath("s3://no-such-bucket", "x")
NO_SUCH = "there is no such bucket; make it, or correct the URL"


@pytest.mark.parametrize(
    ("arguments", "begins", "ends"),
    [
        (["predict", THERE / "run", "--input", NO_BUCKET], f"{NO_BUCKET}: cannot be ", NO_SUCH),
        (["predict", THERE / "run", "--output", NO_BUCKET], f"{NO_BUCKET}: cannot be ", NO_SUCH),
        (["export", THERE / "run", "--output", NO_BUCKET], f"{NO_BUCKET}: cannot be ", NO_SUCH),
        (["import", NO_BUCKET, "--into", THERE / "run", "--output", THERE / "o", *PAIR], NO_BUCKET, NO_SUCH),
        (
            ["import", THERE / "new.csv", "--into", THERE / "run", "--output", NO_BUCKET, *PAIR],
            f"{NO_BUCKET}: cannot be ",
            NO_SUCH,
        ),
        (["evaluate", NO_BUCKET], NO_BUCKET, NO_SUCH),
        (
            ["evaluate", THERE / "run", "--input", THERE / "none.csv"],
            f"{THERE / 'none.csv'}: no such file or folder; check the paths given",
            "",
        ),
        (
            ["import", THERE / "none.pt", "--into", THERE / "run", "--output", THERE / "o", *PAIR],
            f"{THERE / 'none.pt'}: ",
            "",
        ),
    ],
)
def test_what_is_not_there_is_one_line(twins: Twins, arguments: list[object], begins: str, ends: str) -> None:
    line = refused(*arguments)
    assert line.startswith(f"hybrid {arguments[0]}: {begins}")
    assert line.endswith(ends)


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        pytest.param(["predict", THERE / "run", "--input", NEW], "new.csv", marks=pytest.mark.long),
        pytest.param(["evaluate", THERE / "run", "--input", NEW], "new.csv", marks=pytest.mark.long),
        (["predict", THERE / "run", "--input", NEW, "--output", THERE / "mine.csv"], "mine.csv"),
        (["export", THERE / "run", "--output", THERE / "mine"], "mine"),
        (["import", THERE / "new.pt", "--into", THERE / "run", "--output", THERE / "o", *PAIR], "new.pt"),
    ],
)
def test_what_is_forbidden_is_one_line(
    twins: Twins, store: Store, arguments: list[object], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(store) as proxy:
        proxy.plan = lambda method, path: "403" if place in path else None
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{proxy.address}")
        line = refused(*arguments)
    assert line.startswith(f"hybrid {arguments[0]}: {THERE / place}: cannot be ")
    assert line.count("cannot be") == 1
    assert line.endswith(CREDENTIALS)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_run_whose_input_lies_in_a_store(twins: Twins, tmp_path: Path) -> None:
    """The same bits as of the same rows on a disk, whoever reads them; then, commands of their own."""
    found = []
    for name, folder in zip(("here", "there"), twins.both(), strict=True):
        run = folder / "launched"
        columns = {"label": "clicked", "dense": '["price"]', "sparse": '["user"]'}
        data = {"format": "csv", "path": folder / "clicks.csv", "cache_folder": tmp_path / name, **columns}
        more = settings(data=data, run={"folder": run}, train={"batch_size": 8, "epochs": 1})
        output_of(["launch", *more], tmp_path, afresh=True)
        shown = output_of(["evaluate", run, "--input", folder / "new.csv"], tmp_path, afresh=True)
        output = folder / "of-launched.parquet"
        rows = ["--input", folder / "new.csv", "--output", output]
        output_of(["predict", run, *rows], tmp_path, afresh=True)
        found.append((shown.replace(str(folder), "FOLDER"), files.read_bytes(output)))
    assert found[1] == found[0]

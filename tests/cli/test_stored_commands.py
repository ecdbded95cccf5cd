"""Commands on runs and files in a store: their results equal those on a disk."""

import re

import pytest
from support.commands import refusal
from support.stores import BUCKET, Proxy, Store, sent
from support.trained import clicks_config, write_clicks, write_trained

import hybrid
from hybrid.storage import files
from hybrid.storage.remote_path import RemotePath, StoragePath
from workers.cli import main

STORED = RemotePath(f"s3://{BUCKET}", "commands")
Twins = tuple[StoragePath, StoragePath]
CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to credentials that may do this"
)


def joined(folder: StoragePath) -> dict[str, object]:
    """Return keys that join a side table of a folder."""
    join = f'table("{folder}/items.csv", key = "item")'
    return {"sparse": ["user", "item", "tags", "brand"], "joins": [join]}


@pytest.fixture(scope="module")
def twins(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    """A folder with a run and new rows, and a copy in a store."""
    local = tmp_path_factory.mktemp("local")
    write_clicks(local / "new.csv", 60, seed=8)
    (local / "items.csv").write_text("item,brand\n" + "".join(f"i{i},b{i % 4}\n" for i in range(9)))
    write_trained(local / "run", clicks_config(local, data=joined(local)))
    sent(local, STORED)
    # The run in the store has read its rows from the store.
    other = tmp_path_factory.mktemp("other")
    config = clicks_config(other, data={"path": str(STORED / "clicks.csv"), **joined(STORED)})
    files.remove(STORED / "run")
    sent(write_trained(other / "run", config), STORED / "run")
    return local, STORED


def printed(capsys: pytest.CaptureFixture[str], folder: StoragePath) -> str:
    """Return the output, with ``FOLDER`` for the name of the folder."""
    return capsys.readouterr().out.replace(str(folder), "FOLDER")


def content_of(folder: StoragePath) -> dict[str, bytes]:
    return {each.path.name: files.read_bytes(each.path) for each in files.list_entries(folder, is_deep=True)}


def test_predictions_are_the_same(twins: Twins, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for folder in twins:
        output = folder / "p.parquet"
        rows = ["--input", str(folder / "new.csv"), "--keep", "user,tags"]
        main(["predict", *rows, "--output", str(output), str(folder / "run")])
        found.append((printed(capsys, folder), files.read_bytes(output)))
        line = refusal("predict", *rows, "--output", output, folder / "run")
        assert line.startswith(f"hybrid predict: {output}: ")
    assert found[0][0].startswith("wrote 60 predictions to FOLDER/p.parquet; ")
    assert found[1] == found[0]


def test_metrics_are_the_same(twins: Twins, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for folder in twins:
        main(["evaluate", str(folder / "run"), f"--input={folder / 'new.csv'}"])
        found.append(printed(capsys, folder))
    assert re.search(r"\nauc +0\.\d{4}\n", found[0])
    assert found[1] == found[0]


def test_exports_are_the_same(twins: Twins, capsys: pytest.CaptureFixture[str]) -> None:
    found, loaded = [], []
    for folder in twins:
        main(["export", str(folder / "run"), "--output", str(folder / "served"), "--format", "tables"])
        content = content_of(folder / "served")
        for name in ("config.toml", "data.json", "manifest.json"):  # they have the paths of the run
            del content[name]
        found.append((printed(capsys, folder), content))
        model = hybrid.load(str(folder / "served"))
        loaded.append([model.rows(name).tolist() for name in model.table_names])
    assert loaded[1] == loaded[0]
    assert found[0][1].keys() >= {"preprocessing.json", "user.0-of-1.safetensors"}
    assert found[1] == found[0]


def test_refused_export_leaves_no_file(twins: Twins, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file without which the others cannot be used is written last."""
    with Proxy(store) as proxy:
        proxy.plan = lambda method, path: "403" if "preprocessing" in path and method == "PUT" else None
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{proxy.address}")
        line = refusal("export", STORED / "run", "--output", STORED / "no", "--format", "tables")
        sent_files = [path for method, path in proxy.seen if method == "PUT" and "." in path]
        assert not files.exists(STORED / "no")
    assert line.startswith(f"hybrid export: {STORED / 'no'}/preprocessing.json: ")
    assert line.endswith(CREDENTIALS)
    assert ["preprocessing" in path for path in sent_files].index(True) == len(sent_files) - 1 > 3


NO_BUCKET = RemotePath("s3://no-such-bucket", "x")


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (["predict", STORED / "run", "--input", NO_BUCKET], NO_BUCKET),
        (["predict", STORED / "run", "--output", NO_BUCKET], NO_BUCKET),
        (["export", STORED / "run", "--output", NO_BUCKET], NO_BUCKET),
        (["evaluate", NO_BUCKET], NO_BUCKET),
        (["evaluate", STORED / "run", "--input", STORED / "none.csv"], STORED / "none.csv"),
    ],
)
def test_missing_path_is_refused_in_one_line(twins: Twins, arguments: list[object], path: RemotePath) -> None:
    line = refusal(*arguments)
    assert line.startswith(f"hybrid {arguments[0]}: {path}")
    assert path != NO_BUCKET or "no such bucket" in line

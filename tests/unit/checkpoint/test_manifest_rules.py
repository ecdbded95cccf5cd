"""Manifests that somebody has made by hand, with a right checksum."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid.checkpoint.checkpoint_files import DENSE_FILE, MANIFEST_FILE, shard_file
from hybrid.checkpoint.checkpoint_manifest import FORMAT, Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.errors import CheckpointError

CHECKSUM = 64 * "0"
Change = Callable[[dict[str, Any]], object]


def forge(folder: Path, change: Change) -> Path:
    """Change the manifest of a checkpoint, and make its checksum right again."""
    path = folder / MANIFEST_FILE
    fields = json.loads(path.read_text())["manifest"]
    change(fields)
    sha256 = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
    path.write_text(json.dumps({"format": FORMAT, "manifest": fields, "sha256": sha256}))
    return path


def put(*keys: str, value: object) -> Change:
    """Sets ``fields[key][key]...`` to a value."""

    def change(fields: dict[str, Any]) -> None:
        for key in keys[:-1]:
            fields = fields[key]
        fields[keys[-1]] = value

    return change


OUTSIDE = [
    *("../x", "..", ".", "...", "", "/etc/passwd", "tables/../../x", "tables/..", "a/b/c", "tables//x"),
    *("dense.safetensors/", "a b", "a\x1b[31m", "a\n", "a\0b", "ä", "x" * 600),
]


@pytest.mark.parametrize("name", OUTSIDE, ids=ascii)
def test_a_file_outside_the_checkpoint_is_refused(folder: Path, name: str) -> None:
    path = forge(folder, put("files", name, value=[0, CHECKSUM]))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert str(caught.value).startswith(f"{path}: is not a manifest: {repr(name)[:80]} must be the name")


@pytest.mark.parametrize("table", ["C1", "a b", "../..", "é/\x1b\n", ".", "50%", "-~"])
def test_the_file_of_any_table_may_be_listed(tmp_path: Path, table: str) -> None:
    files = {shard_file(table, 0, 1): (0, CHECKSUM), "dense.12.safetensors": (2, CHECKSUM)}
    Manifest(1, 1, {table: (5, 3, 1)}, files).write(tmp_path)
    assert Manifest.read(tmp_path / MANIFEST_FILE).tables == {table: (5, 3, 1)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("step", value=-1), "step must be a count"),
        (put("step", value=True), "step must be a count"),
        (put("step", value=10**40), "step must be a count"),
        (put("epoch", value=1.5), "epoch must be a count"),
        (put("more", value=1), "it has other fields"),
        (lambda fields: fields.pop("progress"), "it has other fields"),
        (put("tables", value=[]), "tables must be an object"),
        (put("files", value=None), "files must be an object"),
        (put("metrics", value="auc"), "metrics must be an object"),
        (put("progress", value=3), "progress must be an object"),
        (put("tables", "C\x1b", value=[5, 3]), r"table 'C\\x1b' must have a number of rows, a width, and"),
        (put("tables", "C1", value=[5, -3, 2]), "table 'C1' must have a number of rows, a width, and"),
        (put("tables", "C1", value=[5, 3, 0]), "table 'C1' must have a number of rows, a width, and"),
        (put("files", DENSE_FILE, value=["1", CHECKSUM]), "file dense.safetensors must have a size and a"),
        (put("files", DENSE_FILE, value=[1, "x"]), "file dense.safetensors must have a size and a"),
        (put("files", DENSE_FILE, value={}), "file dense.safetensors must have a size and a"),
        (put("metrics", "auc", value="0.7"), "metric 'auc' must be a number"),
        (put("progress", "best", value=["auc", 0.5]), "best must be a metric, its value, and a step"),
        (put("progress", "best", value=["auc", 0.5, -1]), "best must be a metric, its value, and a step"),
        (put("progress", "best", value="abc"), "best must be a metric, its value, and a step"),
    ],
)
def test_fields_of_other_types_are_refused(folder: Path, change: Change, message: str) -> None:
    path = forge(folder, change)
    with pytest.raises(CheckpointError, match=f"^{path}: is not a manifest: {message}[^\n]*$"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("count", [3, 2**62])
def test_every_file_of_a_table_must_be_listed(folder: Path, count: int) -> None:
    path = forge(folder, put("tables", "C1", value=[5, 3, count]))
    with pytest.raises(CheckpointError, match=f"^{path}: lists no tables/C1.0-of-{count}.safetensors"):
        Checkpoint.open(folder)

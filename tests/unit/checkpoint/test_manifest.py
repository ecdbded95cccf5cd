"""Manifests: their fields are kept, and altered or forged ones are refused in one line."""

import hashlib
import json
import math
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import SHARDS, flip_a_bit

from hybrid.checkpoint.checkpoint_manifest import BEST, DENSE_FILE, FORMAT, MANIFEST_FILE, Best, Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.errors import CheckpointError

CHECKSUM = 64 * "0"
Change = Callable[[dict[str, Any]], object]


def test_numbers_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    Manifest(1, 0, {}, {}, {"auc": math.nan}).write(tmp_path)
    assert math.isnan(Manifest.read(tmp_path / MANIFEST_FILE).metrics["auc"])
    for best in (None, Best("auc", 0.75, 3), Best("log_loss", math.inf, 0)):
        Manifest(5, 1, {}, {}, {}, {BEST: best}).write(tmp_path)
        assert Manifest.read(tmp_path / MANIFEST_FILE).best == best


@pytest.mark.parametrize("name", [DENSE_FILE, *SHARDS])
def test_verification_finds_one_altered_bit(folder: Path, name: str) -> None:
    checkpoint = Checkpoint.open(folder)
    flip_a_bit(folder / name)
    with pytest.raises(CheckpointError, match=f"^{folder / name}: missing or altered"):
        checkpoint.manifest.verify(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"^{folder / name}: cannot be read: No such file"):
        checkpoint.manifest.verify(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"format": FORMAT + 1}), rf"has format {FORMAT + 1}"),
        (json.dumps({"format": 1, "step": 1}), r"has format 1"),
        (500 * '{"a":' + "1" + 500 * "}", r"has format None"),
        (json.dumps({"format": FORMAT, "step": 1}), "is not a manifest"),
        (json.dumps({"format": FORMAT, "manifest": {}, "sha256": ""}), "altered"),
        ("[]", "is not a manifest"),
        ("{", "is not a manifest"),
        (100_000 * "[", "is not a manifest"),
        (100_000 * '{"format": 2, "sha256": "", "manifest": [[', "is not a manifest"),
    ],
    ids=lambda text: text[:60],
)
def test_other_files_are_refused_in_one_line(folder: Path, text: str, message: str) -> None:
    path = folder / MANIFEST_FILE
    path.write_text(text)
    with pytest.raises(CheckpointError, match=rf"^{path}: {message}[^\n]*$"):
        Checkpoint.open(folder)


def test_an_altered_manifest_is_refused(folder: Path) -> None:
    path = folder / MANIFEST_FILE
    path.write_text(path.read_text().replace('"step": 1', '"step": 2'))
    with pytest.raises(CheckpointError, match=f"^{path}: altered"):
        Checkpoint.open(folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=f"^{path}: is not a manifest: it is not a file$"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", [MANIFEST_FILE, DENSE_FILE])
def test_a_fifo_in_place_of_a_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    if name != MANIFEST_FILE:
        forge(folder, lambda fields: fields["files"].update({name: [0, CHECKSUM]}))
    with pytest.raises(CheckpointError, match=f"^{folder / name}: "):
        Checkpoint.newest_valid(folder, print)


def test_a_large_file_is_refused_in_little_memory(folder: Path) -> None:
    os.truncate(folder / MANIFEST_FILE, 400 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=f"^{folder / MANIFEST_FILE}: .* more than 32 MiB$"):
            Checkpoint.open(folder)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def forge(folder: Path, change: Change) -> Path:
    """Change the manifest of a checkpoint, and correct its checksum."""
    path = folder / MANIFEST_FILE
    fields = json.loads(path.read_text())["manifest"]
    change(fields)
    sha256 = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
    path.write_text(json.dumps({"format": FORMAT, "manifest": fields, "sha256": sha256}))
    return path


def put(*keys: str, value: object) -> Change:
    """Return a function that sets ``fields[key][key]...`` to a value."""

    def change(fields: dict[str, Any]) -> None:
        for key in keys[:-1]:
            fields = fields[key]
        fields[keys[-1]] = value

    return change


OUTSIDE = [
    *("../x", "..", ".", "...", "", "/etc/passwd", "tables/../../x", "tables/..", "a/b/c", "tables//x"),
    *("dense.safetensors/", "a b", "a\x1b[31m", "a\n", "a\0b", "ä", "x" * 600),
]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((put("files", name, value=[0, CHECKSUM]), ".* must be the name of a file") for name in OUTSIDE),
        *((put("step", value=value), "step must be a count") for value in (-1, True, 10**40)),
        (put("epoch", value=1.5), "epoch must be a count"),
        (put("more", value=1), "it has other fields"),
        (lambda fields: fields.pop("progress"), "it has other fields"),
        (put("tables", value=[]), "tables must be an object"),
        (put("files", value=None), "files must be an object"),
        (put("metrics", value="auc"), "metrics must be an object"),
        (put("progress", value=3), "progress must be an object"),
        (put("tables", "C\x1b", value=[5, 3]), r"table 'C\\x1b' must have"),
        (put("tables", "C1", value=[5, -3, 2]), "table 'C1' must have"),
        (put("tables", "C1", value=[5, 3, 0]), "table 'C1' must have"),
        (put("files", DENSE_FILE, value=["1", CHECKSUM]), "file dense"),
        (put("files", DENSE_FILE, value=[1, "x"]), "file dense"),
        (put("files", DENSE_FILE, value={}), "file dense"),
        (put("metrics", "auc", value="0.7"), "metric 'auc' must be a number"),
        (put("parts", value="../parts-0"), ".* must be the name of a folder"),
        *(
            (put("progress", "best", value=v), "best must be")
            for v in (["auc", 0.5], ["auc", 0.5, -1], "abc")
        ),
    ],
)
def test_a_forged_manifest_is_refused(folder: Path, change: Change, message: str) -> None:
    path = forge(folder, change)
    with pytest.raises(CheckpointError, match=f"^{path}: is not a manifest: {message}[^\n]*$"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("count", [3, 2**62])
def test_every_shard_of_a_table_must_be_listed(folder: Path, count: int) -> None:
    path = forge(folder, put("tables", "C1", value=[5, 3, count]))
    with pytest.raises(CheckpointError, match=f"^{path}: lists no tables/C1.0-of-{count}.safetensors"):
        Checkpoint.open(folder)

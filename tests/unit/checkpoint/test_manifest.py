"""Manifests: what they say is kept, and all that is altered is seen, in one line and in little memory."""

import json
import math
import os
import tracemalloc
from pathlib import Path

import pytest
from support.checkpoints import SHARDS, flip_a_bit

from hybrid.checkpoint.checkpoint_files import DENSE_FILE, MANIFEST_FILE
from hybrid.checkpoint.checkpoint_manifest import BEST, FORMAT, Best, Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.errors import CheckpointError


def test_numbers_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    Manifest(1, 0, {}, {}, {"auc": math.nan}).write(tmp_path)
    assert math.isnan(Manifest.read(tmp_path / MANIFEST_FILE).metrics["auc"])


@pytest.mark.parametrize("name", [DENSE_FILE, *SHARDS])
def test_one_altered_bit_is_seen_when_the_checkpoint_is_verified(folder: Path, name: str) -> None:
    flip_a_bit(folder / name)
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match=f"^{folder / name}: missing or altered since"):
        checkpoint.manifest.verify(folder)


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(folder: Path) -> None:
    read = Checkpoint.open(folder).manifest
    (folder / DENSE_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"^{folder / DENSE_FILE}: cannot be read: No such file"):
        read.verify(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"format": FORMAT + 1}), rf"has format {FORMAT + 1}, .*"),
        (json.dumps({"format": 1, "step": 1}), r"has format 1, .*"),
        (json.dumps({}), r"has format None, .*"),
        (500 * '{"a":' + "1" + 500 * "}", r"has format None, .*"),
        (json.dumps({"format": FORMAT, "step": 1}), "is not a manifest: .*"),
        (json.dumps({"format": FORMAT, "manifest": {}, "sha256": ""}), "altered since the checkpoint was .*"),
        ("[]", "is not a manifest: .*"),
        ("{", "is not a manifest: .*"),
        (100_000 * "[", "is not a manifest: .*"),
        (100_000 * '{"manifest":', "is not a manifest: .*"),
        (100_000 * '{"format": 2, "sha256": "", "manifest": [[', "is not a manifest: .*"),
    ],
    ids=lambda text: text[:60],
)
def test_other_manifests_are_refused_in_one_line(folder: Path, text: str, message: str) -> None:
    path = folder / MANIFEST_FILE
    path.write_text(text)
    with pytest.raises(CheckpointError, match=rf"^{path}: {message}$"):
        Checkpoint.open(folder)


def test_a_manifest_that_says_another_step_is_altered(folder: Path) -> None:
    path = folder / MANIFEST_FILE
    path.write_text(path.read_text().replace('"step": 1', '"step": 2'))
    with pytest.raises(CheckpointError, match=f"^{path}: altered since the checkpoint was written$"):
        Checkpoint.open(folder)


def test_a_manifest_that_is_too_large_is_not_read_to_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid.checkpoint.checkpoint_manifest._MAX_BYTES", 1 << 20)
    path = folder / MANIFEST_FILE
    os.truncate(path, 100 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=f"^{path}: is not a manifest: it has more than 1 MiB$"):
            Checkpoint.open(folder)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_manifest_that_is_no_file_is_refused(folder: Path) -> None:
    path = folder / MANIFEST_FILE
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=f"^{path}: is not a manifest: it is not a file$"):
        Checkpoint.open(folder)


def test_the_best_checkpoint_is_known(tmp_path: Path) -> None:
    for best in (None, Best("auc", 0.75, 3), Best("log_loss", math.inf, 0)):
        Manifest(5, 1, {}, {}, {}, {BEST: best}).write(tmp_path)
        assert Manifest.read(tmp_path / MANIFEST_FILE).best == best
    Manifest(5, 1, {}).write(tmp_path)
    assert Manifest.read(tmp_path / MANIFEST_FILE).best is None

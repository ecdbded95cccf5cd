"""Folders of checkpoints and deltas, their manifests, and reading them, on a disk and in a store."""

import dataclasses
import errno
import json
import math
import os
import re
import shutil
import time
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import SHAPES, SHARDS, flip_a_bit, forge, names, write_checkpoint, write_run
from support.hostile import check_line
from support.stopped_runs import saved_steps
from support.stores import BUCKET, Proxy, Store
from torch import Tensor

from hybrid.checkpoint import checkpoint_folders, deltas
from hybrid.checkpoint.checkpoint_folders import DENSE_FILE, MANIFEST_FILE, Manifest, shard_file, step_folder
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.deltas import DeltaChain, ModelVersion, open_delta, read_changes
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.errors import CheckpointError, HybridError, StorageError
from hybrid.storage import files
from hybrid.storage.remote_path import StoragePath, parse_path


@pytest.fixture(params=["path", "url"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> StoragePath:
    """The folder of a run without checkpoints, on a disk or in a store."""
    if request.param == "path":
        return tmp_path
    request.getfixturevalue("store")
    return parse_path(f"s3://{BUCKET}/runs/{tmp_path.name}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a complete checkpoint after step 1."""
    return write_checkpoint(tmp_path / "step-1")


def all_files(run: StoragePath) -> list[StoragePath]:
    return [each.path for each in files.list_entries(run, is_deep=True)]


def test_a_checkpoint_is_read_as_it_was_written(run: StoragePath) -> None:
    written = write_checkpoint(step_folder(run, 1))
    assert (written, checkpoint_folders.list_checkpoints(run)) == (step_folder(run, 1), [written])
    stored = Checkpoint.newest_valid(run, pytest.fail)
    manifest = stored.manifest
    assert (stored.folder, manifest.step, manifest.epoch) == (written, 1, 2)
    assert (manifest.metrics, manifest.progress) == ({"auc": 0.75}, {"samples": 7})
    assert {name: tuple(shape) for name, shape in manifest.tables.items()} == SHAPES
    expected = {stored.files_folder / name for name in (DENSE_FILE, *SHARDS)}
    assert {*all_files(written)} == expected | {written / MANIFEST_FILE}
    assert stored.tensors(DENSE_FILE)["net.w"].equal(torch.arange(4.0))
    assert stored.read_rows("C1", SHAPES["C1"][:2]).equal(torch.ones(5, 3))


@pytest.mark.parametrize("table", ["../weird name/é", "商" * 28, "a" * 240, "/" * 500], ids=len)
def test_a_table_may_have_any_name(table: str, tmp_path: Path) -> None:
    tables = {table: (1, 2, 1), f"{table}b": (1, 2, 1)}
    shards = [shard_file(name, 0, 1) for name in tables]
    assert len(set(shards)) == 2
    assert all((tmp_path / name).resolve().parent == tmp_path / "tables" for name in shards)
    written = [write_tensors(tmp_path, name, {"weight": torch.ones(1, 2)}) for name in shards]
    Manifest(1, 1, tables, written[0] | written[1]).write(tmp_path)
    assert Checkpoint.open(tmp_path).read_rows(table, (1, 2)).sum() == 2


class Killed(BaseException):
    """The death of the process."""


def die(*_: object, **__: object) -> None:
    raise Killed


@pytest.mark.parametrize("last", ["tensor_file.struct.pack", "checkpoint_folders.json.dumps", "os.rename"])
def test_a_kill_while_writing_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """During the tensors, before the manifest, or between the manifest and the rename."""
    write_run(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(last if last == "os.rename" else f"hybrid.checkpoint.{last}", die)
        with pytest.raises(Killed):
            write_run(tmp_path, 2)
    assert names(tmp_path / "checkpoints") == ["step-00000001", "step-00000002.partial"]
    assert saved_steps(tmp_path) == [1]
    (tmp_path / "checkpoints/step-00000002.partial/stray").touch()
    write_run(tmp_path, 2)
    assert names(tmp_path / "checkpoints") == ["step-00000001", "step-00000002"]
    assert names(step_folder(tmp_path, 2)) == [DENSE_FILE, MANIFEST_FILE, "tables"]


def test_files_without_a_manifest_are_no_checkpoint(run: StoragePath) -> None:
    partial = checkpoint_folders.begin(step_folder(run, 3))
    write_tensors(partial, DENSE_FILE, {"net.w": torch.arange(4.0)})
    assert checkpoint_folders.list_checkpoints(run) == []
    with pytest.raises(CheckpointError, match="checkpoint"):
        Checkpoint.newest_valid(run, pytest.fail)
    checkpoint_folders.remove_after(run, 0)
    assert all_files(run) == []


def test_checkpoints_are_sorted_by_number(tmp_path: Path) -> None:
    write_run(tmp_path, 2, 110, 99_999_999, 1_000_000_000, 30)
    for other in ("step-abc", "best", "step-00000004.partial"):
        (tmp_path / "checkpoints" / other).mkdir()
        (tmp_path / "checkpoints" / other / MANIFEST_FILE).touch()
    assert saved_steps(tmp_path) == [1_000_000_000, 99_999_999, 110, 30, 2]
    assert saved_steps(tmp_path / "absent") == []


@pytest.mark.parametrize("damage", ["shorter", "longer", "missing", "a folder"])
@pytest.mark.parametrize("is_committed", [True, False])
def test_a_file_of_another_size_is_refused(tmp_path: Path, damage: str, is_committed: bool) -> None:
    """Before the commit, a host may have written to another folder; later, the file may be damaged."""
    folder = checkpoint_folders.begin(tmp_path / "step-1")
    written = checkpoint_folders.write_text(folder, "one", "text")
    if is_committed:
        folder = checkpoint_folders.commit(folder, Manifest(1, 0, {}, written))
    (folder / "one").unlink()
    if damage == "a folder":
        (folder / "one").mkdir()
    elif damage != "missing":
        (folder / "one").write_text("tex" if damage == "shorter" else "texts")
    if is_committed:
        with pytest.raises(CheckpointError, match=f"^{folder / 'one'}: "):
            Checkpoint.open(folder)
    else:
        with pytest.raises(CheckpointError, match=rf"^{folder / 'one'}: .*run\.folder"):
            checkpoint_folders.commit(folder, Manifest(1, 0, {}, written))
        assert not (tmp_path / "step-1").exists()


def test_a_lost_file_in_a_store_is_found_before_it_is_read(run: StoragePath) -> None:
    write_run(run, 1, 2)
    newest = Checkpoint.open(step_folder(run, 2))
    files.remove(newest.files_folder / SHARDS[0])
    log: list[str] = []
    assert Checkpoint.newest_valid(run, log.append).manifest.step == 1
    assert log[0].startswith(f"{newest.files_folder / SHARDS[0]}: missing or altered")
    files.remove(step_folder(run, 2) / MANIFEST_FILE)
    assert Checkpoint.newest_valid(run, pytest.fail).manifest.step == 1


def test_a_file_of_the_same_size_in_a_store_is_verified_when_it_is_read(store: Store) -> None:
    stored = Checkpoint.open(write_checkpoint(parse_path(f"s3://{BUCKET}/altered/step-00000001")))
    content = files.read_bytes(stored.files_folder / DENSE_FILE)
    files.write_bytes(stored.files_folder / DENSE_FILE, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=DENSE_FILE):
        Checkpoint.open(stored.folder).tensors(DENSE_FILE)
    partial = checkpoint_folders.begin(stored.folder.with_name("step-00000002"))
    written = checkpoint_folders.write_text(partial, "config.toml", "text")
    folder = checkpoint_folders.commit(partial, Manifest(2, 0, {}, written))
    files.write_bytes(partial / "config.toml", b"next")
    with pytest.raises(CheckpointError, match=r"config\.toml: "):
        Checkpoint.newest_valid(folder, pytest.fail)


def test_folders_are_flushed_around_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("hybrid.checkpoint.checkpoint_folders.sync", synced.append)
    write_checkpoint(tmp_path / "step-1")
    partial = tmp_path / "step-1.partial"
    assert (set(synced[:-1]), synced[-1]) == ({partial, partial / "tables"}, tmp_path)


def test_checkpoints_are_not_reached_through_a_link(tmp_path: Path) -> None:
    write_run(tmp_path / "mine", 1, 2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "mine/checkpoints")
    for use in (
        lambda: checkpoint_folders.prune(tmp_path / "run", 1, None),
        lambda: checkpoint_folders.remove_after(tmp_path / "run", 0),
        lambda: Checkpoint.newest_valid(tmp_path / "run", print),
    ):
        with pytest.raises(HybridError, match=f"^{tmp_path}/run/checkpoints: "):
            use()
    assert saved_steps(tmp_path / "mine") == [2, 1]


def test_a_checkpoint_is_not_overwritten(run: StoragePath) -> None:
    folder = write_checkpoint(step_folder(run, 1))
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoint_folders.begin(folder)
    assert Checkpoint.open(folder).manifest.step == 1


def test_two_runs_that_write_the_same_step_to_a_store_do_not_mix(store: Store) -> None:
    run = parse_path(f"s3://{BUCKET}/mixed")
    folder = step_folder(run, 3)
    one, two = checkpoint_folders.begin(folder), checkpoint_folders.begin(folder)
    first = write_tensors(one, DENSE_FILE, {"w": torch.zeros(3)})
    second = write_tensors(two, DENSE_FILE, {"w": torch.ones(3)})
    checkpoint_folders.commit(one, Manifest(3, 0, {}, first))
    with pytest.raises(CheckpointError, match=f"^{folder}: another run"):
        checkpoint_folders.commit(two, Manifest(3, 0, {}, second))
    checkpoint_folders.remove_after(run, 3)
    assert Checkpoint.open(folder).tensors(DENSE_FILE)["w"].eq(0).all()
    assert {each.parent.name for each in all_files(run)} == {one.name, folder.name}


@pytest.mark.parametrize("function", ["os.fsync", "os.rename", "pathlib.Path.mkdir", "shutil.rmtree"])
def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    (tmp_path / "step-1.partial").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(function, refuse)
        with pytest.raises(CheckpointError, match=f" {tmp_path}/step-1.*No space"):
            write_checkpoint(tmp_path / "step-1")
    assert not (tmp_path / "step-1").exists()


def test_a_manifest_that_the_store_refuses_leaves_no_checkpoint(store: Store) -> None:
    with Proxy(store) as proxy:
        run = parse_path(f"s3://{BUCKET}/refused?scheme=http&endpoint_override={proxy.address}")
        proxy.plan = lambda method, path: "403" if method != "HEAD" and f"/{MANIFEST_FILE}" in path else None
        with pytest.raises(CheckpointError, match=r"s3://.*manifest\.json.*credentials"):
            write_checkpoint(step_folder(run, 1))
        assert checkpoint_folders.list_checkpoints(run) == []


def test_the_newest_and_the_best_are_kept(run: StoragePath) -> None:
    write_run(run, 1, 2, 3, 4, 5)
    for keep_last, best, kept in (
        (9, 2, [5, 4, 3, 2, 1]),
        (3, 1, [5, 4, 3, 1]),
        (2, 5, [5, 4]),
        (1, None, [5]),
    ):
        checkpoint_folders.prune(run, keep_last, best)
        assert saved_steps(run) == kept
        manifests = {each.parent for each in all_files(run) if each.name == MANIFEST_FILE}
        assert manifests == {*checkpoint_folders.list_checkpoints(run)}


def test_a_kill_while_removing_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", die)
        with pytest.raises(Killed):
            checkpoint_folders.prune(tmp_path, 1, None)
    assert names(tmp_path / "checkpoints") == ["step-00000001.partial", "step-00000002"]
    assert saved_steps(tmp_path) == [2]
    checkpoint_folders.remove_after(tmp_path, 2)
    assert names(tmp_path / "checkpoints") == ["step-00000002"]


def test_checkpoints_after_the_resumed_step_are_dropped(run: StoragePath) -> None:
    """A damaged one before it stays, with its files."""
    write_run(run, 8, 9, 10, 100_000_000)
    files.write_bytes(step_folder(run, 8) / MANIFEST_FILE, b"{")
    checkpoint_folders.remove_after(run, 9)
    assert (saved_steps(run), len(all_files(run))) == ([9, 8], 2 * len([MANIFEST_FILE, DENSE_FILE, *SHARDS]))


CHECKSUM = 64 * "0"
Change = Callable[[dict[str, Any]], object]


def test_numbers_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    Manifest(1, 0, {}, {}, {"auc": math.nan}).write(tmp_path)
    assert math.isnan(Manifest.read(tmp_path / MANIFEST_FILE).metrics["auc"])
    for best in (None, checkpoint_folders.Best("log_loss", math.inf, 0)):
        Manifest(5, 1, {}, {}, {}, {checkpoint_folders.BEST: best}).write(tmp_path)
        assert Manifest.read(tmp_path / MANIFEST_FILE).best == best


@pytest.mark.parametrize("name", [DENSE_FILE, *SHARDS])
def test_verification_finds_one_altered_bit(folder: Path, name: str) -> None:
    checkpoint = Checkpoint.open(folder)
    for damage in (flip_a_bit, Path.unlink):
        damage(folder / name)
        with pytest.raises(CheckpointError, match=f"^{folder / name}: "):
            checkpoint.manifest.verify(folder)


def test_unchanged_file_is_verified_once(folder: Path, tmp_path: Path) -> None:
    """Also as a hard link in another folder. A new file may change within the resolution of its time."""
    manifest, path, linked = Checkpoint.open(folder).manifest, folder / SHARDS[0], tmp_path / "linked"
    shutil.copytree(folder, linked, copy_function=os.link)
    now, checked = time.time(), pytest.raises(CheckpointError, match=path.name)
    for at, changed_at, check in (
        (now, now, checked),
        (now - 60, now - 60, nullcontext()),
        (now - 60, now - 50, checked),
    ):
        os.utime(path, (at, at))
        manifest.verify(folder)
        flip_a_bit(path)
        os.utime(path, (changed_at, changed_at))
        with check:
            manifest.verify(linked)
        flip_a_bit(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"format": checkpoint_folders.FORMAT + 1}), f"format {checkpoint_folders.FORMAT + 1}"),
        (60 * '{"a":' + "1" + 60 * "}", "format None"),
        ('{"format": "\\ud800"}', "manifest"),
        (json.dumps({"format": checkpoint_folders.FORMAT, "step": 1}), "manifest"),
        (100_000 * "[", "manifest"),
        (100_000 * '{"format": 2, "sha256": "", "manifest": [[', "manifest"),
    ],
    ids=lambda text: text[:60],
)
def test_other_files_are_refused_in_one_line(folder: Path, text: str, message: str) -> None:
    path = folder / MANIFEST_FILE
    path.write_text(text)
    with pytest.raises(CheckpointError, match=f"^{path}: .*{message}[^\n]*$"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", [MANIFEST_FILE, DENSE_FILE])
def test_fifos_and_folders_are_refused(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    (folder / name).unlink()
    make(folder / name)
    if name != MANIFEST_FILE:
        forge(folder, lambda fields: fields["files"].update({name: [0, CHECKSUM]}))
    with pytest.raises(CheckpointError, match=f"^{folder / name}: "):
        Checkpoint.newest_valid(folder, print)


def test_a_large_file_is_refused_in_little_memory(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=f" {folder / MANIFEST_FILE}: .* 32 MiB"):
        Manifest(1, 0, {}, progress={"counter": "x" * (32 << 20)}).write(folder)
    os.truncate(folder / MANIFEST_FILE, 400 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=f"^{folder / MANIFEST_FILE}: .* 32 MiB"):
            Checkpoint.open(folder)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


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
        *((put("files", name, value=[0, CHECKSUM]), ".* file") for name in OUTSIDE),
        *((put("step", value=value), ".*step") for value in (-1, True, 10**19)),
        (put("step", value=10**40), "it has an integer"),
        (put("epoch", value=1.5), "'epoch'"),
        *((change, "its fields") for change in (put("more", value=1), lambda fields: fields.pop("progress"))),
        *((put(name, value=3), f"'{name}'") for name in ("tables", "files", "metrics", "progress")),
        (put("tables", "C\x1b", value=[5, 3]), r"'C\\x1b'"),
        *((put("tables", "C1", value=value), "table 'C1'") for value in ([5, -3, 2], [5, 3, 0])),
        (put("files", DENSE_FILE, value=["1", CHECKSUM]), f"'{DENSE_FILE}'"),
        (put("files", DENSE_FILE, value=[1, "x"]), "file dense"),
        (put("files", DENSE_FILE, value={}), f"'{DENSE_FILE}'"),
        (put("metrics", "auc", value="0.7"), "'auc'"),
        (put("parts", value="../parts-0"), ".* folder"),
        *(
            (put("progress", "best", value=v), ".*best")
            for v in (["auc", 0.5], ["auc", 0.5, -1], ["auc", 0.5, 10**9], "abc")
        ),
    ],
)
def test_a_forged_manifest_is_refused(folder: Path, change: Change, message: str) -> None:
    path = forge(folder, change)
    with pytest.raises(CheckpointError, match=f"^{path}: .*: {message}[^\n]*$"):
        Checkpoint.open(folder)


def test_a_checkpoint_must_be_of_the_step_of_its_folder(tmp_path: Path) -> None:
    folder = step_folder(write_run(tmp_path / "run", 1, 7), 7)
    path = forge(folder, put("step", value=3))
    with pytest.raises(CheckpointError, match=f"^{path}: .*step 3"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", [MANIFEST_FILE, DENSE_FILE, "tables"])
def test_no_file_of_a_checkpoint_is_reached_through_a_link(folder: Path, name: str) -> None:
    """The linked files have the right content."""
    opened = Checkpoint.open(folder)
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")
    reads: list[Callable[[], object]] = [lambda: Checkpoint.open(folder)]
    if name != MANIFEST_FILE:
        file = DENSE_FILE if name == DENSE_FILE else SHARDS[0]
        reads += [lambda: opened.manifest.verify(folder), lambda: opened.tensors(file)]
    for read in reads:
        with pytest.raises(HybridError, match=f"^{folder / name}"):
            read()


@pytest.mark.parametrize("count", [3, 2**62])
def test_every_shard_of_a_table_must_be_listed(folder: Path, count: int) -> None:
    path = forge(folder, put("tables", "C1", value=[5, 3, count]))
    with pytest.raises(CheckpointError, match=f"^{path}: lists no tables/C1.0-of-{count}.safetensors"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("num_rows", [1, 4, 13])
@pytest.mark.parametrize("then", range(1, 7))
def test_rows_of_any_number_of_shards_load_into_any_number(tmp_path: Path, num_rows: int, then: int) -> None:
    values_RD = torch.arange(2.0 * num_rows).view(num_rows, 2)
    for shard in range(then):
        tensors = {"weight": values_RD[shard::then], "sum": -values_RD[shard::then, 0]}
        write_tensors(tmp_path, shard_file("t", shard, then), tensors)
    stored = Checkpoint(tmp_path, Manifest(1, 1, {"t": (num_rows, 2, then)}, {}, {}, {}))
    for now in range(1, 7):
        for index in range(now):
            values = values_RD[index::now]
            into = {
                "weight": torch.full_like(values, torch.nan),
                "sum": torch.full((len(values),), torch.nan),
            }
            stored.load_rows("t", index, now, into)
            assert torch.equal(into["weight"], values)
            assert torch.equal(into["sum"], -values[:, 0])
    for other in (num_rows - 1, num_rows + 1):
        with pytest.raises(CheckpointError, match="table t"):
            stored.load_rows("t", 0, 1, {"weight": torch.zeros(other, 2), "sum": torch.zeros(other)})


@pytest.mark.parametrize("tensors", [{}, {"rows": torch.zeros(3, 2)}, {"weight": torch.tensor(1.0)}])
def test_a_file_without_rows_is_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    write_tensors(tmp_path, shard_file("t", 0, 1), tensors)
    stored = Checkpoint(tmp_path, Manifest(1, 1, {"t": (3, 2, 1)}, {}, {}, {}))
    into = {name: torch.zeros(3) for name in tensors}
    for read in (lambda: stored.map_rows("t", 3, 2), lambda: stored.load_rows("t", 0, 1, into)):
        with pytest.raises(CheckpointError, match=f"^{tmp_path}/tables/t.0-of-1.safetensors: "):
            read()


def test_shards_of_other_sizes_are_refused(tmp_path: Path) -> None:
    for shard, num_rows in enumerate((1, 4)):  # not 3 and 2
        write_tensors(tmp_path, shard_file("t", shard, 2), {"weight": torch.zeros(num_rows, 2)})
    stored = Checkpoint(tmp_path, Manifest(1, 1, {"t": (5, 2, 2)}, {}, {}, {}))
    with pytest.raises(CheckpointError, match="table t"):
        stored.map_rows("t", 5, 2)


@pytest.mark.parametrize(
    ("altered", "step"), [([], 110), ([(110, MANIFEST_FILE)], 30), ([(110, DENSE_FILE), (30, DENSE_FILE)], 2)]
)
def test_damaged_checkpoints_are_skipped(tmp_path: Path, altered: list[tuple[int, str]], step: int) -> None:
    logged: list[str] = []
    write_run(tmp_path, 2, 30, 110)
    paths = [step_folder(tmp_path, of_step) / name for of_step, name in altered]
    for path in paths:
        flip_a_bit(path)
    assert Checkpoint.newest_valid(tmp_path, logged.append).manifest.step == step
    assert len(logged) == bool(paths)
    for line in logged:
        damage = "; ".join(f"{path}: [^;]+" for path in paths)
        assert re.fullmatch(f"{damage}; step-{step:08d} is used instead", line)


class TestBestValid:
    """Of a run with checkpoints after steps 2, 30 and 110, of which 30 is the best."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        write_run(tmp_path, 2, 30, 110)
        self.rank(tmp_path, 30)
        return tmp_path

    def rank(self, run: Path, best: int | None, newest: int = 110) -> None:
        """Record the best checkpoint in the newest."""
        folder = step_folder(run, newest)
        progress = {"best": None if best is None else checkpoint_folders.Best("auc", 0.75, best)}
        read = Manifest.read(folder / MANIFEST_FILE)
        dataclasses.replace(read, progress=progress).write(folder)

    @pytest.mark.parametrize(
        ("best", "step", "rank_text"),
        [
            (30, 30, "the best (auc 0.7500); the last is step-00000110"),
            (110, 110, "the best (auc 0.7500) and the last"),
            (None, 110, "the last"),
        ],
    )
    def test_the_best_or_last_is_opened(self, run: Path, best: int | None, step: int, rank_text: str) -> None:
        self.rank(run, best)
        found = Checkpoint.best_valid(run, pytest.fail)
        assert (found.manifest.step, found.folder) == (step, step_folder(run, step))
        assert found.rank_text == rank_text
        named = Checkpoint.best_valid(step_folder(run, 2), pytest.fail)
        assert (named.manifest.step, named.rank_text) == (2, "")

    @pytest.mark.parametrize("is_there", [True, False])
    def test_the_newest_replaces_a_damaged_or_missing_best(self, run: Path, is_there: bool) -> None:
        logged: list[str] = []
        best = step_folder(run, 30)
        if is_there:
            flip_a_bit(best / DENSE_FILE)
        else:
            shutil.rmtree(best)
        found = Checkpoint.best_valid(run, logged.append)
        assert (found.manifest.step, found.rank_text) == (110, "the last")
        (line,) = logged
        assert line.startswith(f"{best / DENSE_FILE if is_there else best}: ")
        assert "step-00000110" in line

    def test_an_older_manifest_names_the_best_if_the_newest_is_damaged(self, run: Path) -> None:
        self.rank(run, 2, newest=30)
        flip_a_bit(step_folder(run, 110) / MANIFEST_FILE)
        found = Checkpoint.best_valid(run, pytest.fail)
        assert found.manifest.step == 2
        assert found.rank_text == "the best (auc 0.7500); the last is step-00000110"

    def test_a_run_without_valid_checkpoints_is_an_error(self, run: Path) -> None:
        for step in (2, 30, 110):
            flip_a_bit(step_folder(run, step) / MANIFEST_FILE)
        with pytest.raises(CheckpointError, match=r"step-00000110/manifest.*; .*step-00000002/manifest"):
            Checkpoint.best_valid(run, pytest.fail)
        with pytest.raises(CheckpointError, match=f"^{run / 'absent'}: "):
            Checkpoint.best_valid(run / "absent", pytest.fail)


BASE = ModelVersion(0, 3, 64 * "a", "", 1.5)


def write_delta(run: StoragePath, step: int = 5) -> ModelVersion:
    """Write a delta of two tables, of which the second grows, to :data:`BASE`."""
    partial = checkpoint_folders.begin(deltas.delta_folder(run, step))
    weight = torch.arange(4.0).view(2, 2)
    fixed = {"rows": torch.tensor([0, 7]), "weight": weight}
    grown = {"keys": torch.tensor([-5, 9]), "weight": weight, "evicted": torch.tensor([4])}
    files = write_tensors(partial, shard_file("fixed", 0, 1), fixed)
    files |= write_tensors(partial, shard_file("grown", 0, 1), grown)
    manifest = Manifest(
        step, 0, {"fixed": (8, 2, 1), "grown": (0, 2, 1)}, files, {}, {deltas.PARENT: BASE.identity}
    )
    checkpoint_folders.commit(partial, manifest)
    return ModelVersion(1, step, deltas.identity_of(manifest), BASE.identity, 2.5)


def test_a_chain_and_its_deltas_are_read_as_written(folder: StoragePath) -> None:
    assert DeltaChain.read(folder) is None
    version = write_delta(folder)
    chain = DeltaChain(BASE, BASE.identity, (version,))
    chain.write(folder)
    assert DeltaChain.read(folder) == chain
    assert chain.after(BASE.identity) == (version,)
    assert chain.after(version.identity) == ()
    assert chain.after(64 * "b") is None
    delta = open_delta(folder, version)
    ((rows, weight, evicted),) = read_changes(delta, "fixed", 8, 2)
    assert (rows.tolist(), weight.tolist(), evicted.tolist()) == ([0, 7], [[0, 1], [2, 3]], [])
    ((keys, _, evicted),) = read_changes(delta, "grown", None, 2)
    assert (keys.tolist(), evicted.tolist()) == ([-5, 9], [4])
    for table, num_rows, dim in (("fixed", 7, 2), ("fixed", 8, 3), ("fixed", None, 2), ("grown", 8, 2)):
        with pytest.raises(CheckpointError, match=f"table {table}"):
            read_changes(delta, table, num_rows, dim)
    with pytest.raises(CheckpointError, match="step-00000005"):
        open_delta(folder, dataclasses.replace(version, parent=64 * "b"))
    checkpoint_folders.remove_after(folder, 9)
    assert DeltaChain.read(folder) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(format=2),
        lambda document: document.pop("base"),
        lambda document: document.update(more=1),
        lambda document: document["base"].update(step="3"),
        lambda document: document["base"].update(step=-3),
        lambda document: document["base"].update(identity=64 * "b"),
        lambda document: document["deltas"].append(document["deltas"][0]),
        lambda document: document.update(deltas={}),
    ],
)
def test_an_invalid_chain_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    DeltaChain(BASE, BASE.identity, (ModelVersion(1, 5, 64 * "c", BASE.identity, 2.5),)).write(tmp_path)
    path = tmp_path / "deltas/current.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=str(path)) as caught:
        DeltaChain.read(tmp_path)
    check_line(caught.value)


def test_links_to_other_folders_are_not_followed(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    version = write_delta(other)
    DeltaChain(BASE, BASE.identity, (version,)).write(other)
    run.mkdir()
    (run / "deltas").symlink_to(other / "deltas")
    for use in (
        DeltaChain.read,
        lambda each: open_delta(each, version),
        lambda each: checkpoint_folders.remove_after(each, 0),
    ):
        with pytest.raises(StorageError, match="deltas"):
            use(run)
    assert DeltaChain.read(other) is not None

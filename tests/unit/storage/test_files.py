"""Paths and URLs, and files and folders of this machine and of stores by the same functions."""

import gzip
import os
import pickle
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support.stores import BUCKET

from hybrid.errors import StorageError
from hybrid.storage import files
from hybrid.storage.remote_path import RemotePath, StoragePath, is_url, parse_path

MIB = 1 << 20
KINDS = ("path", "store", "google", "azure")


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> StoragePath:
    """An empty folder of this machine or of a store."""
    if request.param == "path":
        return tmp_path
    root = request.getfixturevalue(request.param)
    bucket = root if isinstance(root, RemotePath) else parse_path(f"s3://{BUCKET}")
    return bucket / tmp_path.name


def some_bytes(num_bytes: int) -> bytes:
    return np.random.default_rng(7).bytes(num_bytes)


SIZES = [*product(KINDS, (0, 5)), ("path", 12 * MIB + 3), ("store", 12 * MIB + 3)]


@pytest.mark.parametrize(("folder", "num_bytes"), SIZES, indirect=["folder"])
def test_a_file_has_its_content(folder: StoragePath, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 2 * MIB)
    file, content = folder / "a.bin", some_bytes(num_bytes)
    with files.open_writer(file) as writer:
        for start in range(0, num_bytes, 4 * MIB):
            writer.write(memoryview(content)[start : start + 4 * MIB])
    assert files.require_file(file).size == num_bytes
    assert files.read_bytes(file) == content
    assert b"".join(files.read_blocks(file)) == content
    with files.local_copy(file, files.compute_checksum(file)) as local:
        mapped = np.memmap(local, np.uint8) if num_bytes else np.empty(0)
    assert mapped.tobytes() == content  # the file itself may be gone


@pytest.mark.parametrize("name", ["loop", "loop/a", "a" * 300])
def test_a_path_that_cannot_be_used_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for use in (files.exists, files.list_entries, files.require_file, files.read_bytes):
        with pytest.raises(StorageError, match=rf"^{tmp_path / name}: .*$"):
            use(tmp_path / name)


def test_python_reads_it_as_a_file(folder: StoragePath) -> None:
    files.write_bytes(folder / "a.gz", gzip.compress(b"one\ntwo\n" * 9))
    with files.open_reader(folder / "a.gz") as raw, gzip.open(raw, "rt") as text:
        assert text.readlines() == ["one\n", "two\n"] * 9
    with files.open_reader(folder / "a.gz") as raw:
        end = raw.seek(0, 2)
        assert (raw.seek(-4, 2), len(raw.read()), raw.tell()) == (end - 4, 4, end)


def test_folders_are_listed_and_removed(folder: StoragePath) -> None:
    for name in ("run/b", "run/c", "run/deep/d", "runs"):
        target = folder / name
        if isinstance(target, Path):
            target.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(target, name.encode())
    listed = [(each.path.name, each.size, each.is_folder) for each in files.list_entries(folder / "run")]
    assert listed == [("b", 5, False), ("c", 5, False), ("deep", 0, True)]
    deep = files.list_entries(folder / "run", is_deep=True)
    assert [e.path for e in deep] == [folder / name for name in ("run/b", "run/c", "run/deep/d")]
    assert files.exists(folder / "run")
    assert not files.is_file(folder / "run")
    files.remove(folder / "run" / "b")
    assert [e.path.name for e in files.list_entries(folder / "run")] == ["c", "deep"]
    files.remove(folder / "run")
    assert not files.exists(folder / "run")
    assert files.read_bytes(folder / "runs") == b"runs"
    files.remove(folder / "run")  # there is none
    assert files.list_entries(folder / "run") == []


def test_a_missing_file_is_a_file_not_found_error(folder: StoragePath) -> None:
    for read in (files.read_bytes, files.require_file, files.compute_checksum):
        with pytest.raises(FileNotFoundError) as caught:
            read(folder / "none")
        assert str(folder / "none") in str(caught.value)


@pytest.mark.parametrize("folder", ["store", "google", "azure"], indirect=True)
def test_the_tag_of_a_file_depends_on_its_content(folder: RemotePath) -> None:
    for name, content in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        files.write_bytes(folder / name, content)
    a, b, c = (files.content_tag(folder / name) for name in "abc")
    if folder.root.startswith("abfs"):  # which has no tags
        assert a == b == c == ""
        return
    assert a == c != b
    files.write_bytes(folder / "a", b"2")
    assert files.content_tag(folder / "a") == b


@pytest.mark.parametrize(
    ("num_bytes", "before"),
    [(5, {}), (5, {"torn": b"earlier"}), (12 * MIB, {"torn": b"earlier"})],
    ids=["new", "overwrite", "large"],
)
def test_failed_writes_change_nothing(folder: StoragePath, num_bytes: int, before: dict[str, bytes]) -> None:
    for name, content in before.items():
        files.write_bytes(folder / name, content)

    def write() -> None:
        with files.open_writer(folder / "torn") as writer:
            writer.write(bytes(num_bytes))
            raise KeyError

    with pytest.raises(KeyError):
        write()
    after = files.list_entries(folder, is_deep=True)
    assert {entry.path.name: files.read_bytes(entry.path) for entry in after} == before
    files.write_bytes(folder / "torn", bytes(num_bytes))
    after = files.list_entries(folder, is_deep=True)
    assert [(entry.path.name, entry.size) for entry in after] == [("torn", num_bytes)]


def test_an_error_of_the_caller_is_not_converted(folder: StoragePath) -> None:
    files.write_bytes(folder / "a", b"1")
    with pytest.raises(KeyError), files.open_reader(folder / "a"):
        raise KeyError


@pytest.mark.parametrize("text", ["runs/r", "/data/clicks.csv", "C1.txt", "a:b", "file:///data/a%20b.csv"])
def test_other_texts_are_paths(text: str) -> None:
    assert parse_path(text) == Path(text.removeprefix("file://").replace("%20", " "))
    assert not is_url(text)


@pytest.mark.parametrize(
    ("text", "root", "key"),
    [
        ("s3://bucket", "s3://bucket", ""),
        ("s3://bucket/runs//r/", "s3://bucket", "runs/r"),
        ("gcs://bucket/a", "gs://bucket", "a"),
        ("abfss://box@account.dfs.core.windows.net/a/b", "abfss://box@account.dfs.core.windows.net", "a/b"),
        ("s3://bucket/a%20b%2525", "s3://bucket", "a b%25"),
        ("s3://bucket/a#b", "s3://bucket", "a#b"),
    ],
)
def test_a_url_has_a_root_and_a_key(text: str, root: str, key: str) -> None:
    named = parse_path(text)
    assert named == RemotePath(root, key)
    assert parse_path(str(named)) == named
    assert is_url(text)


def test_a_remote_path_has_the_attributes_of_a_path() -> None:
    run = parse_path("s3://bucket/runs/r?region=eu-west-1")
    file = run / "tables" / "C1.0-of-2.safetensors"
    assert str(file) == "s3://bucket/runs/r/tables/C1.0-of-2.safetensors?region=eu-west-1"
    assert (file.name, file.suffix) == ("C1.0-of-2.safetensors", ".safetensors")
    assert file.parent.parent == run
    assert run.with_name("q") == parse_path("s3://bucket/runs/q?region=eu-west-1")
    assert pickle.loads(pickle.dumps(file)) == file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3://me:secret@bucket/a", "s3://bucket: "),
        ("s3://bucket/a?secret_key=secret", "secret_key"),
        ("abfs://box@account/a?sas_token=secret", "sas_token"),
        ("s3://bucket/a?regoin=x", "regoin"),
        ("gs://bucket/a?region=x", "anonymous, endpoint_override, scheme"),
        ("ftp://host/a", "ftp://host/a"),
        ("s3:///a", "bucket"),
        ("file://elsewhere/data", "elsewhere"),
    ],
)
def test_a_url_with_credentials_or_unknown_parts_is_refused(text: str, message: str) -> None:
    with pytest.raises(StorageError) as caught:
        parse_path(text)
    assert message in str(caught.value)
    assert "secret@" not in str(caught.value)
    assert "=secret" not in str(caught.value)


def test_a_remote_path_is_not_accepted_as_a_local_one() -> None:
    with pytest.raises(TypeError, match="s3://bucket/a"):
        os.stat(parse_path("s3://bucket/a"))

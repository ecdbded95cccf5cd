"""Parsing of paths and URLs; URLs with credentials are refused."""

import os
import pickle
from pathlib import Path

import pytest

from hybrid.errors import StorageError
from hybrid.storage.remote_path import RemotePath, is_url, parse_path


@pytest.mark.parametrize("text", ["runs/r", "/data/clicks.csv", "C1.txt", "a:b"])
def test_other_texts_are_paths(text: str) -> None:
    assert parse_path(text) == Path(text)
    assert not is_url(text)


def test_a_file_url_is_a_path() -> None:
    assert parse_path("file:///data/a%20b.csv") == Path("/data/a b.csv")
    with pytest.raises(StorageError, match="file of another host"):
        parse_path("file://elsewhere/data")


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
        ("s3:///a", "names no bucket"),
    ],
)
def test_a_url_with_credentials_or_unknown_options_is_refused(text: str, message: str) -> None:
    with pytest.raises(StorageError) as caught:
        parse_path(text)
    assert message in str(caught.value)
    assert "secret@" not in str(caught.value)
    assert "=secret" not in str(caught.value)


def test_a_remote_path_is_not_accepted_as_a_local_one() -> None:
    with pytest.raises(TypeError, match="s3://bucket/a"):
        os.stat(parse_path("s3://bucket/a"))

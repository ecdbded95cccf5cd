"""The stores of Google and Azure: where they differ from S3, and their errors."""

from collections.abc import Callable

import pytest

from hybrid.errors import OutageError, StorageError
from hybrid.storage import files, store_clients
from hybrid.storage.object_stores import _store_error
from hybrid.storage.remote_path import RemotePath, parse_path


def missing_bucket(bucket: RemotePath) -> RemotePath:
    """Return a bucket of the same store that does not exist."""
    if bucket.root.startswith("gs"):
        return RemotePath("gs://no-such-bucket", "", bucket.query)
    return bucket.with_name("no-such-bucket")


def test_a_missing_bucket_is_an_error(other_store: RemotePath) -> None:
    file = missing_bucket(other_store) / "a"
    asked: list[Callable[[], object]] = [
        lambda: files.write_bytes(file, b"1"),
        lambda: files.list_entries(file),
        lambda: files.exists(file),
    ]
    for ask in asked:
        with pytest.raises(StorageError, match="there is no such bucket; make it, or correct the URL"):
            ask()
    with pytest.raises(FileNotFoundError):
        files.read_bytes(file)


def test_a_file_is_replaced_atomically(other_store: RemotePath) -> None:
    folder = other_store / "whole"
    files.write_bytes(folder / "a", b"old")
    with files.open_writer(folder / "a") as file:
        file.write(bytes(65 << 20))
        assert files.read_bytes(folder / "a") == b"old"
    assert files.require_file(folder / "a").size == 65 << 20
    assert [each.path for each in files.list_entries(folder, is_deep=True)] == [folder / "a"]


def test_the_tag_of_google_depends_on_the_content(google: RemotePath) -> None:
    folder = google / "tags"
    for name, content in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        files.write_bytes(folder / name, content)
    a, b, c = (files.content_tag(folder / name) for name in "abc")
    assert a == c != b


def test_azure_has_no_tag(azure: RemotePath) -> None:
    files.write_bytes(azure / "tag", b"1")
    assert files.content_tag(azure / "tag") == ""


def test_an_unreachable_store_is_an_outage(monkeypatch: pytest.MonkeyPatch, unused: str) -> None:
    monkeypatch.setattr(store_clients, "RETRY_SECONDS", 1.0)
    store = parse_path(f"gs://b/a?anonymous=true&scheme=http&endpoint_override={unused}")
    with pytest.raises(OutageError, match="endpoint_override in the URL"):
        files.read_bytes(store)


@pytest.mark.long
def test_an_unreachable_account_is_an_outage(monkeypatch: pytest.MonkeyPatch, unused: str) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", "AAAA")
    with pytest.raises(OutageError, match="account in the URL"):
        files.read_bytes(parse_path(f"abfs://me@{unused}/box/a?enable_tls=false"))


def test_a_wrong_key_is_refused(azure: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("AAAA", "!"):
        monkeypatch.setenv("AZURE_STORAGE_KEY", key)
        store_clients._client.cache_clear()
        with pytest.raises(StorageError, match="; set AZURE_STORAGE_KEY"):
            files.read_bytes(azure / "a")
    monkeypatch.delenv("AZURE_STORAGE_KEY")
    store_clients._client.cache_clear()
    with pytest.raises(StorageError, match="; set AZURE_STORAGE_KEY"):
        files.read_bytes(azure / "a")
    store_clients._client.cache_clear()


@pytest.mark.parametrize(
    ("authority", "account", "prefix"),
    [
        ("box@me.dfs.core.windows.net", "me", "box/"),
        ("me.blob.core.windows.net", "me", ""),
        ("me@127.0.0.1:10000", "me", ""),
        ("me@box", "me", "box/"),
    ],
)
def test_a_url_of_azure_has_an_account(authority: str, account: str, prefix: str) -> None:
    assert store_clients._split_azure_authority(authority)[:2] == (account, prefix)


def test_a_url_of_azure_without_an_account_is_refused() -> None:
    with pytest.raises(StorageError, match="names no account; write abfs://CONTAINER@ACCOUNT"):
        files.read_bytes(parse_path("abfs://box/a"))


STATUS = "google::cloud::Status(%s: Permanent error, with a last message of %s error_info={reason=, domain=})"


@pytest.mark.parametrize(
    ("scheme", "said", "remedy", "kind"),
    [
        ("gs", STATUS % ("PERMISSION_DENIED", "Received HTTP status code: 403"), "GOOGLE_", StorageError),
        (
            "gs",
            STATUS % ("UNAVAILABLE", "Could not create a OAuth2 access token"),
            "GOOGLE_",
            StorageError,
        ),
        ("gs", STATUS % ("UNAVAILABLE", "Received HTTP status code: 503"), "try again later", OutageError),
        (
            "gs",
            STATUS % ("UNKNOWN", "PerformWork() - CURL error [60]=SSL"),
            "SSL_CERT_FILE",
            StorageError,
        ),
        ("abfs", "Azure Error: [AuthorizationFailure] 403 Server failed", "AZURE_STORAGE_KEY", StorageError),
        ("abfs", "Azure Error: [ServerBusy] 503 The server is busy", "try again later", OutageError),
        ("abfss", "Fail to get a new connection. SSL peer certificate", "SSL_CERT_FILE", StorageError),
    ],
)
def test_an_error_names_a_remedy(scheme: str, said: str, remedy: str, kind: type[StorageError]) -> None:
    error = _store_error(RemotePath(f"{scheme}://b", "a"), "read", said)
    assert remedy in str(error)
    assert type(error) is kind
    assert "error_info" not in str(error)

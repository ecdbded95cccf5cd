"""Failures of stores: transient ones are retried, others are one line. Google and Azure differ from S3."""

import datetime
import hashlib
import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from support.stores import BUCKET, Proxy, Store
from werkzeug.serving import make_server

from hybrid.errors import OutageError, StorageError
from hybrid.storage import files, object_stores
from hybrid.storage.object_stores import store_request
from hybrid.storage.remote_path import RemotePath, parse_path

NO_BUCKET = RemotePath("s3://none", "")
CONTENT = np.random.default_rng(3).bytes(12 << 20)


@pytest.fixture
def proxy(store: Store) -> Iterator[Proxy]:
    with Proxy(store) as each:
        yield each


def through(proxy: Proxy, name: str) -> RemotePath:
    found = parse_path(f"s3://{BUCKET}/{name}?scheme=http&endpoint_override={proxy.address}")
    assert isinstance(found, RemotePath)
    return found


@pytest.mark.parametrize(
    "fate", ["lose", *(pytest.param(each, marks=pytest.mark.long) for each in ("503", "500", "cut", "slow"))]
)
def test_a_transient_failure_is_retried(proxy: Proxy, fate: str) -> None:
    """Each request fails once: those of an upload, of finding, reading, listing and removing a file."""
    requests = Counter[tuple[str, str]]()

    def plan(method: str, path: str) -> str | None:
        request = method, path
        requests[request] += 1
        # The completion of an upload that the store has processed cannot be repeated.
        is_end = method == "POST" and "uploadId" in path
        return None if requests[request] > 1 or (is_end and fate == "lose") else fate

    file = through(proxy, f"again-{fate}")
    files.write_bytes(file, CONTENT[: 11 << 20])
    proxy.plan = plan
    files.write_bytes(file, CONTENT[: 11 << 20])
    assert files.compute_checksum(file) == hashlib.sha256(CONTENT[: 11 << 20]).hexdigest()
    assert [each.path for each in files.list_entries(file.parent) if each.path == file] == [file]
    files.remove(file)
    assert not files.exists(file)
    assert max(requests.values()) > 1 or fate == "slow"


def test_a_truncated_response_is_retried(proxy: Proxy) -> None:
    file, torn = through(proxy, "torn"), list[str]()
    files.write_bytes(file, CONTENT)

    def plan(method: str, path: str) -> str | None:
        is_first = method == "GET" and len(torn) < 2
        torn.extend([path] if is_first else [])
        return "torn" if is_first else None

    proxy.plan = plan
    assert files.read_bytes(file) == CONTENT
    assert len(torn) == 2


@pytest.mark.parametrize("before", [None, b"earlier"], ids=["new", "overwrite"])
@pytest.mark.parametrize(("num_bytes", "refused"), [(len(CONTENT), "partNumber=2"), (5, "")])
def test_refused_upload_keeps_files(proxy: Proxy, num_bytes: int, refused: str, before: bytes | None) -> None:
    file = through(proxy, f"half-{num_bytes}-{before is None}/a")
    if before is not None:
        files.write_bytes(file, before)
    proxy.plan = lambda method, path: "403" if method == "PUT" and refused in path else None
    with pytest.raises(StorageError, match="credentials"):
        files.write_bytes(file, CONTENT[:num_bytes])
    proxy.plan = lambda method, path: None
    found = {entry.path.name: files.read_bytes(entry.path) for entry in files.list_entries(file.parent)}
    assert found == ({} if before is None else {"a": before})


@pytest.mark.long
def test_a_store_that_stays_down_is_an_error(proxy: Proxy) -> None:
    proxy.plan = lambda method, path: "503"
    with pytest.raises(StorageError):
        files.read_bytes(through(proxy, "down"))
    assert len(proxy.seen) == object_stores.ATTEMPTS


@pytest.mark.parametrize(
    ("fate", "kind"),
    [("503", OutageError), ("500", OutageError), ("cut", OutageError), ("403", StorageError)],
)
def test_an_outage_is_distinguished_from_a_refusal(
    proxy: Proxy, fate: str, kind: type[StorageError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_stores, "ATTEMPTS", 1)
    file = through(proxy, f"down-{fate}")
    files.write_bytes(file, b"content")
    proxy.plan = lambda method, path: fate
    requests: dict[str, Callable[[], object]] = {
        "found": lambda: files.exists(file),
        "listed": lambda: files.list_entries(file.parent),
        "read": lambda: files.read_bytes(file),
        "written": lambda: files.write_bytes(file, b"new"),
        "removed": lambda: files.remove(file),
    }
    for action, request in requests.items():
        with pytest.raises(StorageError, match=f" {action}: ") as caught:
            request()
        assert type(caught.value) is kind


def test_a_refused_request_is_not_retried(proxy: Proxy) -> None:
    proxy.plan = lambda method, path: "403"
    with pytest.raises(StorageError) as caught:
        files.read_bytes(through(proxy, "mine"))
    assert len(proxy.seen) == 1
    text = str(caught.value)
    assert text.startswith(f"s3://{BUCKET}/mine?")
    assert "\n" not in text
    assert "Request ID" not in text
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in text


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of a server on 127.0.0.1 that is its own authority, and its key."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
    builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=True)
    file = tmp_path_factory.mktemp("certificate") / "server.pem"
    file.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + builder.sign(key, SHA256()).public_bytes(Encoding.PEM)
    )
    return file


@pytest.fixture(scope="module")
def address(certificate: Path) -> Iterator[str]:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # of clients that hang up, too
    application = DomainDispatcherApplication(create_backend_app)
    signed = str(certificate)
    server = make_server("127.0.0.1", 0, application, threaded=True, ssl_context=(signed, signed))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(20)
    server.server_close()


def test_certificates_are_checked(address: str, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown one is refused at once. A region gives each request its own client."""
    file, begun = RemotePath("s3://none", "a", f"region=refused&endpoint_override={address}"), monotonic()
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    with pytest.raises(StorageError, match=r"AWS_CA_BUNDLE.*$") as caught:
        files.write_bytes(file, b"1")
    assert not isinstance(caught.value, OutageError)
    assert monotonic() - begun < 10
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    with pytest.raises(StorageError, match="bucket"):
        files.write_bytes(RemotePath("s3://none", "a", f"region=trusted&endpoint_override={address}"), b"1")


@pytest.fixture(params=["google", "azure"])
def other_store(request: pytest.FixtureRequest) -> RemotePath:
    """The bucket of a store that is not S3's."""
    root = request.getfixturevalue(request.param)
    assert isinstance(root, RemotePath)
    return root


@pytest.fixture
def unused_address() -> Iterator[str]:
    """An address where no process listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["store", "google", "azure"])
def test_a_missing_bucket_is_no_outage(kind: str, request: pytest.FixtureRequest) -> None:
    root = request.getfixturevalue(kind)
    if kind == "azure":
        file = root.with_name("no-such-bucket") / "a"
    else:
        file = RemotePath("gs://no-such-bucket", "a", root.query) if kind == "google" else NO_BUCKET / "a"
    for request_of in (partial(files.write_bytes, content=b"1"), files.list_entries, files.exists):
        with pytest.raises(StorageError) as caught:
            request_of(file)
        assert type(caught.value) is StorageError
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


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("s3://b/a?scheme=http&endpoint_override={}", "AWS_ENDPOINT_URL"),
        ("gs://b/a?anonymous=true&scheme=http&endpoint_override={}", "endpoint_override in"),
        pytest.param("abfs://me@{}/box/a?enable_tls=false", "account in", marks=pytest.mark.long),
    ],
)
def test_an_unreachable_store_is_an_outage(
    url: str, remedy: str, unused_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_stores, "ATTEMPTS", 1)
    monkeypatch.setattr(object_stores, "RETRY_SECONDS", 1.0)
    monkeypatch.setenv("AZURE_STORAGE_KEY", "AAAA")
    with pytest.raises(OutageError, match=remedy):
        files.read_bytes(parse_path(url.format(unused_address)))


def test_a_wrong_key_is_refused(azure: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("AAAA", "!"):
        monkeypatch.setenv("AZURE_STORAGE_KEY", key)
        object_stores._client.cache_clear()
        with pytest.raises(StorageError, match="AZURE_STORAGE_KEY"):
            files.read_bytes(azure / "a")
    monkeypatch.delenv("AZURE_STORAGE_KEY")
    object_stores._client.cache_clear()
    with pytest.raises(StorageError, match="AZURE_STORAGE_KEY"):
        files.read_bytes(azure / "a")
    object_stores._client.cache_clear()


@pytest.mark.parametrize(
    ("authority", "account", "prefix"),
    [
        ("box@me.dfs.core.windows.net", "me", "box/"),
        ("me.blob.core.windows.net", "me", ""),
        ("me@127.0.0.1:10000", "me", ""),
        ("me@box", "me", "box/"),
    ],
)
def test_a_url_of_azure_has_an_account(
    authority: str, account: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", "AAAA")
    monkeypatch.setattr("pyarrow.fs.AzureFileSystem", lambda name, **_: name)
    with store_request(RemotePath(f"abfs://{authority}", "a"), "read") as (client, key):
        assert (client, key) == (account, f"{prefix}a")
    with pytest.raises(StorageError, match="account"):
        files.read_bytes(parse_path("abfs://box/a"))


GOOGLE, AZURE = "gs://b", "abfs://box@me.dfs.core.windows.net"
STATUS = "google::cloud::Status(%s: Permanent error, with a last message of %s error_info={reason=, domain=})"


@pytest.mark.parametrize(
    ("url", "text", "remedy", "kind"),
    [
        (GOOGLE, STATUS % ("PERMISSION_DENIED", "Received HTTP status code: 403"), "GOOGLE_", StorageError),
        (GOOGLE, STATUS % ("UNAVAILABLE", "Could not create a OAuth2 access token"), "GOOGLE_", StorageError),
        (GOOGLE, STATUS % ("UNAVAILABLE", "Received HTTP status code: 503"), "try again later", OutageError),
        (GOOGLE, STATUS % ("UNKNOWN", "Work() - CURL error [60]=SSL"), "SSL_CERT_FILE", StorageError),
        (AZURE, "Azure Error: [AuthorizationFailure] 403 Server failed", "AZURE_STORAGE_KEY", StorageError),
        (AZURE, "Azure Error: [ServerBusy] 503 The server is busy", "try again later", OutageError),
        ("abfss://box@me.dfs.core.windows.net", "SSL peer certificate", "SSL_CERT_FILE", StorageError),
    ],
)
def test_an_error_names_a_remedy(
    url: str, text: str, remedy: str, kind: type[StorageError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", "AAAA")
    with pytest.raises(StorageError, match=remedy) as caught, store_request(RemotePath(url, "a"), "read"):
        raise OSError(text)
    assert type(caught.value) is kind
    assert "error_info" not in str(caught.value)

"""Failures of a store: transient ones are retried, others, and unknown certificates, are one line."""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from threading import Thread
from time import monotonic

import numpy as np
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from support.certificates import Certificates, made_in
from support.stores import BUCKET, Proxy, Store
from werkzeug.serving import make_server

from hybrid.errors import OutageError, StorageError
from hybrid.storage import files, store_clients
from hybrid.storage.remote_path import RemotePath, parse_path
from hybrid.storage.store_clients import ATTEMPTS

CONTENT = np.random.default_rng(3).bytes(23 << 20)


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
    """Each request once: initiating an upload, its parts, its end, looking, reading, listing, removing."""
    asked = Counter[tuple[str, str]]()

    def plan(method: str, path: str) -> str | None:
        request = method, path
        asked[request] += 1
        # The completion of an upload that the store has processed cannot be repeated.
        is_end = method == "POST" and "uploadId" in path
        return None if asked[request] > 1 or (is_end and fate == "lose") else fate

    file = through(proxy, f"again-{fate}")
    files.write_bytes(file, CONTENT[: 11 << 20])
    proxy.plan = plan
    files.write_bytes(file, CONTENT[: 11 << 20])
    assert files.compute_checksum(file) == hashlib.sha256(CONTENT[: 11 << 20]).hexdigest()
    assert [each.path for each in files.list_entries(file.parent) if each.path == file] == [file]
    files.remove(file)
    assert not files.exists(file)
    assert max(asked.values()) > 1 or fate == "slow"


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


def test_an_unfinished_upload_leaves_no_file(proxy: Proxy) -> None:
    file = through(proxy, "half")
    proxy.plan = lambda method, path: "403" if "partNumber=2" in path else None
    with pytest.raises(StorageError, match=r"cannot be written: .*credentials that may do this"):
        files.write_bytes(file, CONTENT)
    proxy.plan = lambda method, path: None
    assert not files.exists(file)


@pytest.mark.long
def test_a_store_that_stays_down_is_an_error(proxy: Proxy) -> None:
    proxy.plan = lambda method, path: "503"
    with pytest.raises(StorageError, match=r"cannot be read: .*the store is overloaded or down"):
        files.read_bytes(through(proxy, "down"))
    assert len(proxy.seen) == ATTEMPTS


@pytest.mark.parametrize(
    ("fate", "kind"),
    [("503", OutageError), ("500", OutageError), ("cut", OutageError), ("403", StorageError)],
)
def test_an_outage_is_distinguished_from_a_refusal(
    proxy: Proxy, fate: str, kind: type[StorageError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_clients, "ATTEMPTS", 1)
    file = through(proxy, f"down-{fate}")
    files.write_bytes(file, b"content")
    proxy.plan = lambda method, path: fate
    asked: dict[str, Callable[[], object]] = {
        "found": lambda: files.exists(file),
        "listed": lambda: files.list_entries(file.parent),
        "read": lambda: files.read_bytes(file),
        "written": lambda: files.write_bytes(file, b"new"),
        "removed": lambda: files.remove(file),
    }
    for what, ask in asked.items():
        with pytest.raises(StorageError, match=f"cannot be {what}: ") as caught:
            ask()
        assert type(caught.value) is kind


def test_an_unreachable_store_is_an_outage(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_clients, "ATTEMPTS", 1)
    with Proxy(store) as proxy:
        file = through(proxy, "gone")
    with pytest.raises(OutageError, match="AWS_ENDPOINT_URL"):
        files.read_bytes(file)


def test_a_missing_bucket_is_no_outage(store: Store) -> None:
    with pytest.raises(StorageError, match="there is no such bucket") as caught:
        files.write_bytes(parse_path("s3://none/file"), b"content")
    assert type(caught.value) is StorageError


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
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return made_in(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def address(certificates: Certificates) -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # of clients that hang up, too
    application = DomainDispatcherApplication(create_backend_app)
    signed = str(certificates.server), str(certificates.key)
    server = make_server("127.0.0.1", 0, application, threaded=True, ssl_context=signed)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(20)
    server.server_close()


def test_an_authority_of_the_environment_is_trusted(
    address: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates.authority))
    bucket = RemotePath("s3://none", "", f"region=trusted&endpoint_override={address}")
    with pytest.raises(StorageError, match="there is no such bucket"):
        files.write_bytes(bucket / "a", b"1")


def test_an_unknown_certificate_is_refused_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    bucket = RemotePath("s3://none", "", f"region=refused&endpoint_override={address}")
    begun = monotonic()
    with pytest.raises(StorageError, match="certificate is not trusted; set AWS_CA_BUNDLE") as caught:
        files.write_bytes(bucket / "a", b"1")
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, OutageError)
    assert monotonic() - begun < 10

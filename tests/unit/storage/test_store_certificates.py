"""TLS certificates of stores: of an authority that the environment names, or an unknown one."""

import logging
from collections.abc import Iterator
from threading import Thread
from time import monotonic

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from support.certificates import Certificates, made_in
from werkzeug.serving import make_server

from hybrid.errors import OutageError, StorageError
from hybrid.storage import files
from hybrid.storage.remote_path import RemotePath


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

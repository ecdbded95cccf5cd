"""Servers of object stores on this machine, and failures of networks and stores."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest
from pyarrow import fs
from werkzeug.serving import make_server
from werkzeug.wrappers import Response

from hybrid.config import RunConfig
from hybrid.data.prepare.preparation import ensure_prepared
from hybrid.storage import files
from hybrid.storage.remote_path import RemotePath

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

BUCKET = "bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "somebody",
    "AWS_SECRET_ACCESS_KEY": "something",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_OPEN_BUCKET = "open"
_TIMEOUT_SECONDS = 20.0
_REFUSAL = "<Error><Code>%s</Code><Message>of the test</Message></Error>"
_CODES = {"503": "SlowDown", "500": "InternalError", "403": "AccessDenied"}

# Of a request, by its method and path with query: the failure, or None.
Plan = Callable[[str, str], str | None]


class Store:
    """An S3 server in this process, with one bucket; the environment gives its address to all clients."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs each request
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.address = f"{host}:{port}"
        self.environment = {"AWS_ENDPOINT_URL": f"http://{self.address}"}
        self.request("PUT", f"/{BUCKET}")

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the response to an unsigned request."""
        connection = HTTPConnection(self.address, timeout=_TIMEOUT_SECONDS)
        connection.request(method, path, body)
        response = connection.getresponse().read()
        connection.close()
        return response

    def close(self) -> None:
        self._server.stop()


class Proxy:
    """A second address of the S3 server; ``plan`` selects failures.

    A failure is ``cut`` (the connection is cut before the store acts), ``lose`` (after it acts), ``torn`` (in
    the middle of the response), ``slow``, or a status such as ``503``.

    Attributes:
        plan: see above.
        seen: methods and paths of all requests so far.
        num_bytes: of the store's responses so far.
    """

    def __init__(self, store: Store) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self.plan: Plan = lambda method, path: None
        self.seen: list[tuple[str, str]] = []
        self.num_bytes = 0
        self._application: WSGIApplication = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._respond, threaded=True)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(_TIMEOUT_SECONDS)

    def _respond(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["REQUEST_URI"]
        self.seen.append((method, path))
        failure = self.plan(method, path)
        if failure == "slow":
            time.sleep(0.3)
        if failure in _CODES:
            response = Response(_REFUSAL % _CODES[failure], int(failure))
        elif failure == "cut":
            response = Response()
        else:
            response = Response.from_app(self._application, environ, buffered=True)
            self.num_bytes += len(response.data)
        if failure in ("cut", "lose"):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        elif failure == "torn":
            response.response = [response.data[: len(response.data) // 2]]
        return response(environ, start_response)


@contextmanager
def named_by_environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables in the context."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


def sent(folder: Path, target: RemotePath) -> RemotePath:
    """Copy the files of a folder into a store; return their folder there."""
    for path in folder.rglob("*"):
        if path.is_file():
            files.copy(path, target / str(path.relative_to(folder)))
    return target


AZURITE = shutil.which("azurite-blob")
# The public account of every Azurite.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextmanager
def google_bucket() -> Iterator[RemotePath]:
    """A bucket of Google's; it needs no credentials."""
    with _serving([sys.executable, str(Path(__file__).with_name("gcs_server.py"))]) as address:
        yield RemotePath(f"gs://{BUCKET}", "", f"anonymous=true&scheme=http&endpoint_override={address}")


@contextmanager
def azure_container(folder: Path) -> Iterator[RemotePath]:
    """A container of Azure's, whose key is in the environment; its server writes to ``folder``."""
    assert AZURITE is not None
    flags = ["--inMemoryPersistence", "--disableTelemetry", "--silent"]
    flags.append("--skipApiVersionCheck")  # pyarrow requests a newer version of the API
    with _serving([AZURITE, "--blobHost", "127.0.0.1", "--blobPort", "0", *flags], folder) as address:
        options = {f"{kind}_storage_authority": address for kind in ("blob", "dfs")}
        options |= {f"{kind}_storage_scheme": "http" for kind in ("blob", "dfs")}
        fs.AzureFileSystem(_ACCOUNT, account_key=_KEY, **options).create_dir(BUCKET)
        with named_by_environment({"AZURE_STORAGE_KEY": _KEY}):
            yield RemotePath(f"abfs://{_ACCOUNT}@{address}", BUCKET, "enable_tls=false")


@contextmanager
def _serving(command: list[str], folder: Path | None = None) -> Iterator[str]:
    """Start a program that prints the address of its server in a line; yield the address."""
    command = ["setpriv", "--pdeathsig", "KILL", *command]
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            lines = iter(server.stdout.readline, "")
            yield next(found[1] for line in lines if (found := re.search(r"listens on http://(\S+)", line)))
        finally:
            server.kill()


def in_store(config: RunConfig, store: Store, folder: Path, address: str = "") -> RunConfig:
    """Return a configuration with its data in a store that needs no credentials, by their URL.

    Roles of a cluster that is older than the store have no credentials.

    Args:
        folder: of the roles' local files.
        address: of the store, or of a proxy.
    """
    everything = f"arn:aws:s3:::{_OPEN_BUCKET}/*"
    statement = {"Effect": "Allow", "Principal": "*", "Action": "s3:*", "Resource": everything}
    store.request("PUT", f"/{_OPEN_BUCKET}")
    store.request("PUT", f"/{_OPEN_BUCKET}?policy", json.dumps({"Statement": [statement]}).encode())
    query = f"endpoint_override={address or store.address}&scheme=http&region=us-east-1&anonymous=true"
    url = f"s3://{_OPEN_BUCKET}/prepared"
    data = dataclasses.replace(
        config.data, cache_folder=f"{url}?{query}", local_cache_folder=str(folder / "prepared")
    )
    ensure_prepared(config.replace(data=dataclasses.replace(data, cache_folder=url)))
    return config.replace(data=dataclasses.replace(data, local_cache_folder=str(folder / "fetched")))

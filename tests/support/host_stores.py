"""An S3 server on a host, for others to reach."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from support.commands import eventually
from support.hosts import Host
from support.stores import BUCKET, CREDENTIALS

_PORT = 5000  # of a host that has nothing else
_START_SECONDS = 60.0
_SERVE = "import sys; from moto.server import main; main(sys.argv[1:])"
_ASK = """
import sys
from http.client import HTTPConnection
connection = HTTPConnection(sys.argv[1], timeout=20)
connection.request(sys.argv[2], sys.argv[3])
sys.exit(connection.getresponse().status != 200)
"""


@contextmanager
def serving(host: Host) -> Iterator[dict[str, str]]:
    """A store with one bucket on a host; what its clients have in their environment."""
    command = [*host.entering, sys.executable, "-c", _SERVE, "-H", host.address, "-p", str(_PORT)]
    with subprocess.Popen(command, env=host.environment({}), stderr=subprocess.DEVNULL) as server:
        try:
            assert eventually(lambda: _has_bucket(host), _START_SECONDS)
            yield {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://{host.address}:{_PORT}"}
        finally:
            server.kill()


def _has_bucket(host: Host) -> bool:
    """Whether the server makes it, or has it."""
    asked = f"{host.address}:{_PORT}", "PUT", f"/{BUCKET}"
    command = [*host.entering, sys.executable, "-c", _ASK, *asked]
    return subprocess.run(command, env=host.environment({}), stderr=subprocess.DEVNULL).returncode == 0

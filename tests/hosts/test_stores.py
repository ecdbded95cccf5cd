"""Hosts that share a store but no disk: a run is killed, resumed and evaluated."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.commands import eventually, output_of, settings
from support.failures import JOB
from support.host_roles import placed, started_at, started_on
from support.hosts import Host, Switch
from support.namespaces import needs_hosts
from support.stores import BUCKET, CREDENTIALS

pytestmark = needs_hosts

EVERY, CUT = 50, 100  # steps
RUN, DATA = f"s3://{BUCKET}/run", f"s3://{BUCKET}/prepared"
TRAINED = [*JOB, *settings(train={"epochs": 20, "update": "lookahead"}, checkpoint={"every_steps": EVERY})]
# The same on every host.
STORED_JOB = [*TRAINED, *settings(run={"folder": RUN}, data={"cache_folder": DATA}), "--resume", "auto"]


def output_on(host: Host, arguments: Sequence[object], store: Mapping[str, str]) -> str:
    """Run a command on a host to its end; return its output."""
    with started_at(host, arguments, store, before=["env"]) as command:
        ended = command.wait()
    assert ended.code == 0, ended.stderr
    return ended.stdout


@pytest.mark.long
@pytest.mark.timeout(400)
def test_run_without_a_shared_disk_survives_a_killed_host(tmp_path: Path) -> None:
    with Switch(tmp_path) as switch, ExitStack() as stack:
        server, first, second = (switch.host() for _ in range(3))
        store = stack.enter_context(serving(server))
        with started_on(placed([first, second]), STORED_JOB, environment=store) as roles:
            roles["master"].await_step(CUT + EVERY + 1)  # the checkpoint before the last is complete then
            second.kill()
            ended = roles["master"].wait()
            assert (ended.code, roles["trainer 0"].wait().code) == (75, 75)
        assert f"lost worker 0 (host {second.name}, " in ended.stderr, ended.stderr
        second = switch.host(number=2)
        resumed = rf"resuming from step ({CUT}|{CUT + EVERY}): {RUN}"
        for pattern in (resumed, rf"{RUN} has finished"):
            with started_on(placed([first, second]), STORED_JOB, environment=store) as roles:
                endings = {name: command.wait() for name, command in roles.items()}
            assert {name: ended.code for name, ended in endings.items()} == dict.fromkeys(roles, 0), endings
            assert re.search(pattern, endings["master"].stdout), endings["master"].stdout
        evaluated = output_on(second, ["evaluate", RUN, "--trust-code"], store)
        output_on(second, ["predict", RUN, "--output", "p.csv", "--trust-code"], store)
        predicted = second.run("cat", "p.csv")
    one = settings(run={"folder": "one"}, cluster={"trainers": 1, "workers": 1})
    output_of(["launch", *TRAINED, *one, *settings(data={"cache_folder": tmp_path / "prepared"})], tmp_path)
    assert output_of(["evaluate", "one"], tmp_path).splitlines()[-1] == evaluated.splitlines()[-1]
    output_of(["predict", "one", "--output", "p.csv"], tmp_path)
    assert predicted == (tmp_path / "p.csv").read_text()


_PORT = 5000  # on a host without other servers
_START_SECONDS = 60.0
_SERVE = "import sys; from moto.server import main; main(sys.argv[1:])"
_REQUEST = """
import sys
from http.client import HTTPConnection
connection = HTTPConnection(sys.argv[1], timeout=20)
connection.request(sys.argv[2], sys.argv[3])
sys.exit(connection.getresponse().status != 200)
"""


@contextmanager
def serving(host: Host) -> Iterator[dict[str, str]]:
    """Run a store with one bucket on a host; yield the environment of its clients."""
    command = [*host.entering, sys.executable, "-c", _SERVE, "-H", host.address, "-p", str(_PORT)]
    with subprocess.Popen(command, env=host.environment({}), stderr=subprocess.DEVNULL) as server:
        try:
            assert eventually(lambda: _has_bucket(host), _START_SECONDS)
            yield {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://{host.address}:{_PORT}"}
        finally:
            server.kill()


def _has_bucket(host: Host) -> bool:
    """Return whether the server has created the bucket."""
    request = f"{host.address}:{_PORT}", "PUT", f"/{BUCKET}"
    command = [*host.entering, sys.executable, "-c", _REQUEST, *request]
    return subprocess.run(command, env=host.environment({}), stderr=subprocess.DEVNULL).returncode == 0

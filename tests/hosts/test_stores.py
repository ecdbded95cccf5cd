"""Hosts without a common disk, but with a store: a run there is killed, goes on, and is evaluated."""

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
TRAINED = [*JOB, *settings(train={"epochs": 20, "update": "pipelined"}, checkpoint={"every_steps": EVERY})]
# The same on every host, whatever it finds.
JOB_THERE = [*TRAINED, *settings(run={"folder": RUN}, data={"cache_folder": DATA}), "--resume", "auto"]


def said_by(host: Host, arguments: Sequence[object], store: Mapping[str, str]) -> str:
    """What a command prints on a host, which is to come to its end."""
    with started_at(host, arguments, store, before=["env"]) as command:
        ended = command.wait()
    assert ended.code == 0, ended.stderr
    return ended.stdout


@pytest.mark.long
@pytest.mark.timeout(400)
def test_without_a_common_disk_a_run_goes_on_where_a_host_was_killed(tmp_path: Path) -> None:
    with Switch(tmp_path) as switch, ExitStack() as stack:
        server, first, second = (switch.host() for _ in range(3))
        store = stack.enter_context(serving(server))
        with started_on(placed([first, second]), JOB_THERE, environment=store) as roles:
            roles["master"].await_step(CUT + EVERY + 1)  # the checkpoint before the last is there then
            second.kill()
            ended = roles["master"].wait()
            assert (ended.code, roles["trainer 0"].wait().code) == (75, 75)
        assert f"lost worker 0 (host {second.name}, " in ended.stderr, ended.stderr
        second = switch.host(number=2)
        goes_on = rf"resuming from step ({CUT}|{CUT + EVERY}): {RUN}"
        for said in (goes_on, rf"{RUN} has finished"):
            with started_on(placed([first, second]), JOB_THERE, environment=store) as roles:
                endings = {name: command.wait() for name, command in roles.items()}
            assert {name: ended.code for name, ended in endings.items()} == dict.fromkeys(roles, 0), endings
            assert re.search(said, endings["master"].stdout), endings["master"].stdout
        evaluated = said_by(second, ["evaluate", RUN, "--trust-code"], store)
        said_by(second, ["predict", RUN, "--output", "p.csv", "--trust-code"], store)
        predicted = second.run("cat", "p.csv")
    one = settings(run={"folder": "one"}, cluster={"trainers": 1, "workers": 1})
    output_of(["launch", *TRAINED, *one, *settings(data={"cache_folder": tmp_path / "prepared"})], tmp_path)
    assert output_of(["evaluate", "one"], tmp_path).splitlines()[-1] == evaluated.splitlines()[-1]
    output_of(["predict", "one", "--output", "p.csv"], tmp_path)
    assert predicted == (tmp_path / "p.csv").read_text()


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

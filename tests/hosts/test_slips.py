"""Slips of those who start roles on several hosts: each is one line, with the remedy, from every role."""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.commands import ROOT, Ended, settings
from support.host_roles import MASTER, placed, started_at, started_on
from support.hosts import HOME, INTERFACE, Host, Switch
from support.namespaces import needs_hosts

from hybrid.security.secret import VARIABLE
from workers.exit_codes import ExitCode

pytestmark = [needs_hosts, pytest.mark.long]

SECONDS = 40.0
ROLES = (MASTER, "trainer 0", "worker 0")
ANOTHER_SECRET = "1f9a6c07e2b85d34a1c6f70e9b2d4853"


@pytest.fixture
def job(tiny: list[str], shared: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run of its own, which waits for little."""
    run = shared / tmp_path_factory.mktemp("run").name
    cluster = {"start_timeout_seconds": 8, "timeout_seconds": 4}
    return [*tiny, *settings(run={"folder": run}, cluster=cluster)]


def endings(
    places: Mapping[str, Host], job: Sequence[object], own: Mapping[str, Sequence[object]] | None = None
) -> dict[str, Ended]:
    with started_on(places, job, own) as roles:
        return {name: command.wait(SECONDS) for name, command in roles.items()}


def check_one_line(
    ended: Mapping[str, Ended],
    reason: str,
    by: Sequence[str] = (MASTER,),
    code: ExitCode = ExitCode.FAILED,
) -> None:
    """See that all fail with one line: those of ``by`` with the reason, others since the master says so."""
    for name, each in ended.items():
        prefix = "" if name in by else r"stopped by the master: (\S+ \d \(host \S+, pid \d+\) has ended: )?"
        assert each.code == code, each
        assert re.fullmatch(f"hybrid {name}: {prefix}{reason}\n", each.stderr), each.stderr


def test_a_name_that_means_the_host_itself(switch: Switch, shared: Path, job: list[str]) -> None:
    """As Debian writes it into /etc/hosts."""
    host = switch.host(shared, lines="127.0.0.1 localhost\n127.0.1.1 host-3\n")
    try:
        with started_at(host, ["master", *job, *settings(cluster={"master": "host-3"})]) as master:
            ended = master.wait(SECONDS)
    finally:
        host.kill()
        switch.hosts.remove(host)
    said = r"hybrid master: cluster\.master = 'host-3': .*127\.0\.1\.1.*/etc/hosts.*\n"
    assert ended.code == 1
    assert re.fullmatch(said, ended.stderr), ended.stderr


def test_a_module_of_the_users_own_that_one_host_lacks(
    hosts: list[Host], job: list[str], shared: Path
) -> None:
    shutil.copy(ROOT / "tests/support/dropout_net.py", shared / "net.py")
    hosts[0].run("cp", shared / "net.py", HOME / "own_net.py")
    own = settings(dense={"net": "own_net:build"})
    reason = (
        r"dense\.net = 'own_net:build': cannot be imported: .*'own_net' on host host-1; install it there.*"
    )
    check_one_line(endings(placed(hosts[:2], trainers=2), [*job, *own]), reason)


def test_a_folder_below_that_where_each_is(hosts: list[Host], job: list[str]) -> None:
    """The master takes a relative one from where it is; on another host there is another, or none."""
    reason = (
        rf"{HOME}/run\S* on host host-1 is not that of the master's host host-0 \(.+\); run\.folder must be "
        "storage that all hosts share"
    )
    check_one_line(endings(placed(hosts[:2]), [*job, *settings(run={"folder": "run"})]), reason)


def test_another_secret(hosts: list[Host], job: list[str]) -> None:
    with started_on({MASTER: hosts[0]}, [*job, *settings(cluster={"trainers": 1, "workers": 1})]):
        worker = ["worker", "--index", 0, "--master", hosts[0].name]
        with started_at(hosts[1], worker, {VARIABLE: ANOTHER_SECRET}) as command:
            ended = command.wait(SECONDS)
    reason = (
        r"cluster\.secret_file: the master at host-0:29300 has another secret; give every role the same.*"
    )
    check_one_line({"worker 0": ended}, reason, by=("worker 0",))


@contextmanager
def closed_way(one: Host, other: Host) -> Iterator[None]:
    """A firewall between two hosts that lets nothing through, and tells nobody: frames go to no address."""
    nowhere = f"lladdr 02:00:00:00:00:99 dev {INTERFACE} nud permanent"
    one.configure(f"neigh replace {other.address} {nowhere}")
    other.configure(f"neigh replace {one.address} {nowhere}")
    try:
        yield
    finally:
        one.configure(f"neigh delete {other.address} dev {INTERFACE}")
        other.configure(f"neigh delete {one.address} dev {INTERFACE}")


def test_a_firewall_between_two_roles(hosts: list[Host], job: list[str]) -> None:
    with closed_way(*hosts[1:]):
        ended = endings(dict(zip(ROLES, hosts, strict=True)), job)
    ways = [("trainer 0 on host host-1", "worker 0 on host host-2", r"10\.77\.0\.3")]
    ways.append((ways[0][1], ways[0][0], r"10\.77\.0\.2"))
    said = [
        rf"{one} cannot reach {other} at {address}:\d+ \(timed out\); is there a firewall between them\? .*"
        for one, other, address in ways
    ]
    first = (MASTER, "trainer 0")
    check_one_line({name: ended[name] for name in first}, said[0], by=first, code=ExitCode.AGAIN)
    check_one_line({"worker 0": ended["worker 0"]}, said[1], by=("worker 0",), code=ExitCode.AGAIN)


def test_a_firewall_before_the_master(hosts: list[Host], job: list[str]) -> None:
    wait = settings(cluster={"start_timeout_seconds": 2})
    with closed_way(*hosts[:2]):
        ended = endings(placed(hosts[:2]), job, {"worker 0": wait})
    reason = (
        r"no master at host-0:29300 after 2 s: nothing comes back to host host-1; check the address, and "
        "whether a firewall blocks port 29300"
    )
    check_one_line({"worker 0": ended["worker 0"]}, reason, by=("worker 0",), code=ExitCode.AGAIN)
    missing = r"missing after 8 s \(cluster\.start_timeout_seconds\): worker 0"
    check_one_line({name: ended[name] for name in ROLES[:2]}, missing, code=ExitCode.AGAIN)


@pytest.mark.parametrize(
    ("own", "before", "environment", "reason"),
    [
        pytest.param(
            settings(cluster={"interface": "lo"}),
            None,
            {},
            r"cluster\.interface = 'lo': worker 0 on host host-1 would be reached by lo, which no .*",
            id="an interface that no other host reaches",
        ),
        pytest.param(
            [],
            ["prlimit", "--nofile=100:100"],
            {},
            r"a role of .* needs about \d+ open files, and 100 are allowed \(ulimit -Hn\); raise that, .*",
            id="descriptors used up",
        ),
        pytest.param(
            [],
            [],
            {"PYTHONPATH": f"{HOME}/other:{ROOT}"},
            r"worker 0 on host host-1 has torch 9\.9, the master on host host-0 \S+; install the same on .*",
            id="torch of another version",
        ),
    ],
)
def test_a_host_that_is_not_like_the_others(
    own: list[str],
    before: list[str] | None,
    environment: Mapping[str, str],
    reason: str,
    hosts: list[Host],
    job: list[str],
) -> None:
    """Whoever comes when the master has gone finds none, so only these two are sure to hear of it."""
    metadata = f"{HOME}/other/torch-9.9.dist-info"
    text = "Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n"
    hosts[1].run("sh", "-c", f"mkdir -p {metadata} && printf '{text}' > {metadata}/METADATA")
    places = placed(hosts[:2])
    counts = settings(cluster={"trainers": 1, "workers": 1})
    with started_on({name: places[name] for name in ROLES[:2]}, [*job, *counts]) as others:
        worker = ["worker", "--index", 0, "--master", hosts[0].name, *own]
        with started_at(hosts[1], worker, environment, before=before) as command:
            ended = command.wait(SECONDS)
        master = others[MASTER].wait(SECONDS)
    check_one_line({"worker 0": ended}, reason, by=("worker 0",))
    said = rf"hybrid master: (worker 0 \(.*\) has ended: )?{reason}\n"
    assert re.fullmatch(said, master.stderr), master

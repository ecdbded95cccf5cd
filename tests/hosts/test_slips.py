"""Mistakes in starting roles on several hosts: every role reports one line with the remedy."""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
    """A job in its own run folder, with short timeouts."""
    run = shared / tmp_path_factory.mktemp("run").name
    cluster = {"start_timeout_seconds": 8, "timeout_seconds": 4}
    return [*tiny, *settings(run={"folder": run}, cluster=cluster)]


def endings(
    hosts: Mapping[str, Host], job: Sequence[object], own: Mapping[str, Sequence[object]] | None = None
) -> dict[str, Ended]:
    with started_on(hosts, job, own) as roles:
        return {name: command.wait(SECONDS) for name, command in roles.items()}


def check_one_line(
    ended: Mapping[str, Ended], reason: str, by: Sequence[str] = (MASTER,), code: ExitCode = ExitCode.FAILED
) -> None:
    """Check that roles fail with one line: those of ``by`` with the reason, others stopped by the master."""
    for name, each in ended.items():
        prefix = "" if name in by else r"stopped by the master: (\S+ \d \(host \S+, pid \d+\) has ended: )?"
        assert each.code == code, each
        assert re.fullmatch(f"hybrid {name}: {prefix}{reason}\n", each.stderr), each.stderr


def test_name_that_resolves_to_loopback_is_refused(switch: Switch, shared: Path, job: list[str]) -> None:
    """Debian writes such a line into /etc/hosts."""
    host = switch.host(shared, lines="127.0.0.1 localhost\n127.0.1.1 host-3\n")
    try:
        with started_at(host, ["master", *job, *settings(cluster={"master": "host-3"})]) as master:
            ended = master.wait(SECONDS)
    finally:
        host.kill()
        switch.hosts.remove(host)
    pattern = r"hybrid master: cluster\.master = 'host-3': .*127\.0\.1\.1.*/etc/hosts.*\n"
    assert ended.code == 1
    assert re.fullmatch(pattern, ended.stderr), ended.stderr


def test_missing_user_module_names_the_host(hosts: list[Host], job: list[str], shared: Path) -> None:
    shutil.copy(ROOT / "tests/support/dropout_net.py", shared / "net.py")
    hosts[0].run("cp", shared / "net.py", HOME / "custom_net.py")
    own = settings(dense={"net": "custom_net:build"})
    reason = r"dense\.net = 'custom_net:build': cannot be imported: .*'custom_net' on host host-1; .*"
    check_one_line(endings(placed(hosts[:2], trainers=2), [*job, *own]), reason)


def test_relative_folder_on_several_hosts_is_refused(hosts: list[Host], job: list[str]) -> None:
    """A relative folder is below the working directory of each host."""
    reason = (
        rf"{HOME}/run\S* on host host-1 is not that of the master's host host-0 \(.+\); run\.folder must be "
        "storage that all hosts share"
    )
    check_one_line(endings(placed(hosts[:2]), [*job, *settings(run={"folder": "run"})]), reason)


def test_wrong_secret_is_refused(hosts: list[Host], job: list[str]) -> None:
    with started_on({MASTER: hosts[0]}, [*job, *settings(cluster={"trainers": 1, "workers": 1})]):
        worker = ["worker", "--index", 0, "--master", hosts[0].name]
        with started_at(hosts[1], worker, {VARIABLE: ANOTHER_SECRET}) as command:
            ended = command.wait(SECONDS)
    reason = (
        r"cluster\.secret_file: the master at host-0:29300 has another secret; give every role the same.*"
    )
    check_one_line({"worker 0": ended}, reason, by=("worker 0",))


@contextmanager
def firewall(one: Host, other: Host) -> Iterator[None]:
    """Drop all packets between two hosts without a response: frames go to an unused address."""
    unused = f"lladdr 02:00:00:00:00:99 dev {INTERFACE} nud permanent"
    one.configure(f"neigh replace {other.address} {unused}")
    other.configure(f"neigh replace {one.address} {unused}")
    try:
        yield
    finally:
        one.configure(f"neigh delete {other.address} dev {INTERFACE}")
        other.configure(f"neigh delete {one.address} dev {INTERFACE}")


@pytest.mark.parametrize("cause", ["firewall", "interface"])
def test_two_roles_that_cannot_connect_are_named(cause: str, hosts: list[Host], job: list[str]) -> None:
    own = {"worker 0": settings(cluster={"interface": "lo"})} if cause == "interface" else {}
    with firewall(*hosts[1:]) if cause == "firewall" else nullcontext():
        ended = endings(dict(zip(ROLES, hosts, strict=True)), job, own)
    prefix = r"(stopped by the master: )?(\S+ \d \(host \S+, pid \d+\) has ended: )?"
    for name, each in ended.items():
        reason = (
            r".* on host host-\d \(interface \S+\) cannot reach .*; check cluster\.interface, and whether .*"
        )
        assert re.fullmatch(f"hybrid {name}: {prefix}{reason}\n", each.stderr), each.stderr
        assert each.code == ExitCode.AGAIN


def test_firewall_in_front_of_the_master_is_reported(hosts: list[Host], job: list[str]) -> None:
    wait = settings(cluster={"start_timeout_seconds": 2})
    with firewall(*hosts[:2]):
        ended = endings(placed(hosts[:2]), job, {"worker 0": wait})
    reason = (
        r"no master at host-0:29300 after 2 s: timed out \(from host host-1\); check that the master runs, "
        r"its address and port \(cluster\.master\), and firewalls"
    )
    check_one_line({"worker 0": ended["worker 0"]}, reason, by=("worker 0",), code=ExitCode.AGAIN)
    missing = r"missing after 8 s \(cluster\.start_timeout_seconds\): worker 0"
    check_one_line({name: ended[name] for name in ROLES[:2]}, missing, code=ExitCode.AGAIN)


@pytest.mark.parametrize(
    ("before", "environment", "reason"),
    [
        pytest.param(
            ["prlimit", "--nofile=100:100"],
            {},
            r"a role of .* needs about \d+ open files, and 100 are allowed \(ulimit -Hn\); raise that, .*",
            id="descriptors used up",
        ),
        pytest.param(
            [],
            {"PYTHONPATH": f"{HOME}/other:{ROOT}"},
            r"worker 0 on host host-1 has .*torch 9\.9, .*, the master on host host-0 .*; install .*",
            id="torch of another version",
        ),
    ],
)
def test_host_with_other_versions_is_refused(
    before: list[str], environment: Mapping[str, str], reason: str, hosts: list[Host], job: list[str]
) -> None:
    """Only these two roles are sure to report the reason; others may start after the master has ended."""
    metadata = f"{HOME}/other/torch-9.9.dist-info"
    text = "Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n"
    hosts[1].run("sh", "-c", f"mkdir -p {metadata} && printf '{text}' > {metadata}/METADATA")
    places = placed(hosts[:2])
    counts = settings(cluster={"trainers": 1, "workers": 1})
    with started_on({name: places[name] for name in ROLES[:2]}, [*job, *counts]) as others:
        worker = ["worker", "--index", 0, "--master", hosts[0].name]
        with started_at(hosts[1], worker, environment, before=before) as command:
            ended = command.wait(SECONDS)
        master = others[MASTER].wait(SECONDS)
    check_one_line({"worker 0": ended}, reason, by=("worker 0",))
    pattern = rf"hybrid master: (worker 0 \(.*\) has ended: )?{reason}\n"
    assert re.fullmatch(pattern, master.stderr), master

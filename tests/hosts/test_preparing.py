"""A preparation that the hosts of all trainers share has the bytes of one on a single host."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from support.commands import Command, eventually, output_of, settings
from support.failure_runs import JOB
from support.host_roles import MASTER, placed, started_on
from support.host_stores import send_folder, serving, stored
from support.hosts import Host, Switch
from support.namespaces import needs_hosts
from support.stores import BUCKET

pytestmark = [needs_hosts, pytest.mark.long]

SECONDS = 60.0
CORES = len(os.sched_getaffinity(0))
ROWS, NUM_FILES = 1024, 9 * (CORES + 1)  # 4 MB each: too many for as many processes as a host has cores
KINDS = 40
COLUMNS = {"format": "csv", "label": "label", "dense": ["x"], "sparse": ["kind"]}


@pytest.fixture(scope="module")
def clicks(shared: Path) -> Path:
    """A folder of files."""
    folder = shared / "clicks"
    folder.mkdir()
    words = [f"{k:04}" * 1000 for k in range(KINDS)]
    for i in range(NUM_FILES):
        rows = (f"{(i + r) % 2},{r * i % 97},{words[(i * r + r) % KINDS]}\n" for r in range(ROWS))
        (folder / f"{i:02}.csv").write_text("label,x,kind\n" + "".join(rows))
    return folder


@pytest.fixture(scope="module")
def alone(clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one host makes of it."""
    folder = tmp_path_factory.mktemp("alone")
    given = settings(data={**COLUMNS, "path": [str(clicks)], "cache_folder": folder / "prepared"})
    output_of(["launch", *JOB, *given, *settings(train={"max_steps": 1})], folder)
    return content(folder / "prepared")


def content(cache: Path) -> dict[str, bytes]:
    """The files of the one data set in a cache, without the times that they were made at."""
    (folder,) = (path for path in cache.iterdir() if not path.name.startswith("."))
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def preparing(
    hosts: Sequence[Host],
    clicks: Path | str,
    cache: Path | str,
    trainers: int,
    store: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Command]]:
    """A run that prepares, in which the processes of the master's host do nothing until they are woken."""
    data = {**COLUMNS, "path": [str(clicks)], "cache_folder": cache}
    run = {"folder": f"{cache}.run"}
    job = [*JOB, *settings(data=data, run=run, train={"max_steps": 1}), "--resume", "auto"]
    with started_on(placed(hosts, trainers=trainers), job, environment=store) as roles:
        assert eventually(lambda: len(preparers(hosts[0])) == CORES, SECONDS)
        for each in preparers(hosts[0]):
            each.suspend()
        yield roles
        for each in preparers(hosts[0]):
            each.kill()


def wake(host: Host) -> None:
    for each in preparers(host):
        each.resume()


def preparers(host: Host) -> list[psutil.Process]:
    """The processes of a host that do jobs."""
    return [
        each for each in host.processes() if "hybrid.data.prepare.process_pool" in " ".join(each.cmdline())
    ]


def parts(cache: Path) -> dict[str, int]:
    """Those that are there, and which they are."""
    return {path.name: path.stat().st_ino for path in cache.glob(".parts-*/train-*")}


def check_ended_well(roles: dict[str, Command]) -> str:
    """See that all roles do; what the master has said."""
    endings = {name: command.wait() for name, command in roles.items()}
    assert {name: ended.code for name, ended in endings.items()} == dict.fromkeys(roles, 0), endings
    return endings[MASTER].stdout


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_hosts_make_what_one_makes(
    num_hosts: int, hosts: list[Host], clicks: Path, alone: dict[str, bytes], shared: Path
) -> None:
    cache = shared / f"prepared-by-{num_hosts}"
    with preparing(hosts[:num_hosts], clicks, cache, num_hosts) as roles:
        assert eventually(lambda: len(parts(cache)) == NUM_FILES - CORES, SECONDS)
        wake(hosts[0])
        said = check_ended_well(roles)
    for host in hosts[1:num_hosts]:
        assert f"host {host.name} helps to prepare" in said, said
    assert content(cache) == alone
    assert [host.processes() for host in hosts] == [[] for _ in hosts]


def test_one_whose_trainer_was_killed_goes_on_with_its_parts(
    hosts: list[Host], clicks: Path, alone: dict[str, bytes], shared: Path
) -> None:
    cache = shared / "prepared-again"
    with preparing(hosts[:2], clicks, cache, 2) as roles:
        assert eventually(lambda: len(parts(cache)) >= NUM_FILES // 2, SECONDS)
        for each in roles["trainer 1"].processes():
            each.kill()
        assert roles[MASTER].process.wait(SECONDS) == 75
        assert "lost trainer 1 (host host-1" in roles[MASTER].stderr, roles[MASTER].stderr
    before = parts(cache)
    assert len(before) >= NUM_FILES // 2
    with preparing(hosts[:2], clicks, cache, 2) as roles:
        assert eventually(lambda: len(parts(cache)) == NUM_FILES - CORES, SECONDS)
        assert before.items() <= parts(cache).items()
        wake(hosts[0])
        check_ended_well(roles)
    assert content(cache) == alone


def test_a_host_that_sees_other_files_does_not_help(
    hosts: list[Host], clicks: Path, alone: dict[str, bytes], shared: Path
) -> None:
    """It has a folder of its own in the place of the input."""
    cache = shared / "prepared-alone"
    hosts[1].run("mount", "-t", "tmpfs", "tmpfs", clicks)
    try:
        with preparing(hosts[:2], clicks, cache, 2) as roles:
            line = f"host host-1 does not help to prepare: {clicks}/00.csv: cannot be read"
            assert eventually(lambda: line in roles[MASTER].stdout, SECONDS), roles[MASTER].stdout
            assert not parts(cache)
            wake(hosts[0])
            check_ended_well(roles)
    finally:
        hosts[1].run("umount", clicks)
    assert content(cache) == alone


def test_hosts_without_a_common_disk_make_what_one_makes_and_go_on_after_a_kill(
    clicks: Path, tmp_path: Path
) -> None:
    """The input, what hosts send each other, and the prepared data are in a store."""
    data, cache = f"s3://{BUCKET}/clicks", f"s3://{BUCKET}/prepared"
    with Switch(tmp_path) as switch, ExitStack() as stack:
        server, *hosts = switch.host(clicks), switch.host(), switch.host()
        store = stack.enter_context(serving(server))
        send_folder(server, store, clicks, data)

        def sent() -> dict[str, tuple[str, str]]:
            found = stored(server, store, cache)
            return {name: each for name, each in found.items() if name.endswith("/part.json")}

        with preparing(hosts, data, cache, 2, store) as roles:
            assert eventually(lambda: len(sent()) >= NUM_FILES // 2, SECONDS)
            for each in roles["trainer 1"].processes():
                each.kill()
            assert roles[MASTER].process.wait(SECONDS) == 75
        before = sent()
        with preparing(hosts, data, cache, 2, store) as roles:
            assert eventually(lambda: len(sent()) == NUM_FILES - CORES, SECONDS)
            assert before.items() <= sent().items()
            wake(hosts[0])
            said = check_ended_well(roles)
        assert f"host {hosts[1].name} helps to prepare" in said, said
        with preparing(hosts[:1], data, f"{cache}-alone", 1, store) as roles:
            wake(hosts[0])
            said = check_ended_well(roles)
        assert "helps" not in said, said
        together, alone = (_contents(server, store, each) for each in (cache, f"{cache}-alone"))
    assert len(alone) > 8
    assert together == alone


def _contents(host: Host, store: Mapping[str, str], cache: str) -> dict[str, str]:
    """What is in the one data set of a cache, but for the name of its attempt, and where that is said."""
    found = stored(host, store, f"{cache}/").items()
    return {
        name[len(cache) :].split("/", 3)[-1]: content for name, (content, _) in found if "attempt" not in name
    }

"""Hosts that are disconnected, killed or frozen: what is reported, and what is left behind."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import Command, eventually, settings
from support.host_roles import MASTER, placed, started_on
from support.hosts import Host, Switch
from support.namespaces import needs_hosts

pytestmark = [needs_hosts, pytest.mark.long]

BEAT_SECONDS = 2
SECONDS = 20.0
SILENCE = rf"no heartbeat for {BEAT_SECONDS} s \(cluster\.heartbeat_timeout_seconds\)"
STEP = r" (at step|while evaluating after step) \d+"
REMOTE_ROLE = r"(trainer 1|worker 0) \(host host-1, pid \d+\)"
LOG = "; its log may have the cause"
UNREACHABLE = rf"{REMOTE_ROLE} is frozen or unreachable: {SILENCE}{STEP}{LOG}"
OUT_OF_REACH = rf"the master at host-0:29300 is frozen or unreachable: {SILENCE}"
FIRST, SECOND = ("trainer 0", "worker 1"), ("trainer 1", "worker 0")  # the roles of the two hosts


@pytest.fixture
def two(switch: Switch, hosts: list[Host], shared: Path) -> Iterator[list[Host]]:
    """Two hosts; the second is restarted if it was killed."""
    yield hosts[:2]
    if not hosts[1].is_alive:
        hosts[1] = switch.host(shared, number=1)
    switch.up(hosts[1])


@pytest.fixture
def roles(two: list[Host], endless: list[str]) -> Iterator[dict[str, Command]]:
    """A run without an end on two hosts, after its first steps."""
    beat = settings(cluster={"heartbeat_timeout_seconds": BEAT_SECONDS})
    with started_on(placed(two, 2, 2), [*endless, *beat]) as roles:
        roles[MASTER].await_step()
        yield roles


def check_errors(roles: dict[str, Command], reason: str, of_second: str = "") -> None:
    """Check that each role ends with one line: the reason of the master, or that of the second host."""
    expected = {MASTER: reason} | dict.fromkeys(FIRST, f"stopped by the master: {reason}")
    expected |= dict.fromkeys(SECOND, of_second) if of_second else {}
    for name, error in expected.items():
        ended = roles[name].wait(SECONDS)
        assert ended.code == 75, name
        assert re.fullmatch(f"hybrid {name}: {error}\n", ended.stderr), ended.stderr


def check_nothing_left(hosts: list[Host]) -> None:
    assert eventually(lambda: not any(host.processes() for host in hosts), SECONDS)


def test_short_outage_of_a_link_disturbs_no_run(two: list[Host], switch: Switch, endless: list[str]) -> None:
    with started_on(placed(two, 2, 2), endless) as roles:
        roles[MASTER].await_step()
        switch.down(two[1])
        time.sleep(3)  # the outage itself
        stood_at = roles[MASTER].stdout.count("\nstep ")
        switch.up(two[1])
        assert eventually(lambda: roles[MASTER].stdout.count("\nstep ") > stood_at + 5, SECONDS)
        assert [command.stderr for command in roles.values()] == [""] * len(roles)


def test_a_long_outage_ends_the_run(two: list[Host], switch: Switch, roles: dict[str, Command]) -> None:
    switch.down(two[1])
    check_errors(roles, UNREACHABLE, OUT_OF_REACH)
    check_nothing_left(two)


def test_host_whose_processes_all_end_is_reported(two: list[Host], roles: dict[str, Command]) -> None:
    two[1].kill()
    check_errors(roles, rf"lost {REMOTE_ROLE}{STEP}{LOG}")
    check_nothing_left(two[:1])


def test_frozen_host_is_reported(two: list[Host], roles: dict[str, Command]) -> None:
    two[1].freeze()
    check_errors(roles, UNREACHABLE)
    two[1].wake()
    check_nothing_left(two)

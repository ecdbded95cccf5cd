"""A host that is cut off, gone, frozen or stopped for a while: who is named, and that nothing is left."""

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
UNREACHABLE = rf"host host-1 \(trainer 1, worker 0\) is unreachable: {SILENCE}{STEP}"
OUT_OF_REACH = rf"the master at host-0:29300 is unreachable: {SILENCE}"
HERE, THERE = ("trainer 0", "worker 1"), ("trainer 1", "worker 0")  # on the master's host, and on the other


@pytest.fixture
def two(switch: Switch, hosts: list[Host], shared: Path) -> Iterator[list[Host]]:
    """Two of the hosts; the second comes back where it was killed."""
    yield hosts[:2]
    if not hosts[1].is_alive:
        hosts[1] = switch.host(shared, number=1)
    switch.up(hosts[1])


@pytest.fixture
def roles(two: list[Host], endless: list[str]) -> Iterator[dict[str, Command]]:
    """A run on them that goes on and on, at one of its steps."""
    beat = settings(cluster={"heartbeat_timeout_seconds": BEAT_SECONDS})
    with started_on(placed(two, 2, 2), [*endless, *beat]) as roles:
        roles[MASTER].await_step()
        yield roles


def check_said(roles: dict[str, Command], reason: str, there: str = "") -> None:
    """See that all roles end soon with one line: the master's reason, and what those out of its reach say."""
    expected = {MASTER: reason} | dict.fromkeys(HERE, f"stopped by the master: {reason}")
    expected |= dict.fromkeys(THERE, there) if there else {}
    for name, said in expected.items():
        ended = roles[name].wait(SECONDS)
        assert ended.code == 75, name
        assert re.fullmatch(f"hybrid {name}: {said}\n", ended.stderr), ended.stderr


def check_nothing_left(hosts: list[Host]) -> None:
    assert eventually(lambda: not any(host.processes() for host in hosts), SECONDS)


def test_a_cable_that_is_pulled_for_a_while(two: list[Host], switch: Switch, endless: list[str]) -> None:
    with started_on(placed(two, 2, 2), endless) as roles:
        roles[MASTER].await_step()
        switch.down(two[1])
        time.sleep(3)  # the outage itself
        stood_at = roles[MASTER].stdout.count("\nstep ")
        switch.up(two[1])
        assert eventually(lambda: roles[MASTER].stdout.count("\nstep ") > stood_at + 5, SECONDS)
        assert [command.stderr for command in roles.values()] == [""] * len(roles)


def test_a_cable_that_is_pulled_for_long(two: list[Host], switch: Switch, roles: dict[str, Command]) -> None:
    switch.down(two[1])
    check_said(roles, UNREACHABLE, OUT_OF_REACH)
    check_nothing_left(two)


def test_a_host_that_is_gone_without_a_word(
    two: list[Host], switch: Switch, roles: dict[str, Command]
) -> None:
    switch.down(two[1])
    two[1].kill()
    check_said(roles, UNREACHABLE)
    check_nothing_left(two[:1])


def test_a_host_whose_processes_all_end(two: list[Host], roles: dict[str, Command]) -> None:
    two[1].kill()
    check_said(roles, rf"lost host host-1 \(trainer 1, worker 0\){STEP}")
    check_nothing_left(two[:1])


def test_a_host_that_is_frozen(two: list[Host], roles: dict[str, Command]) -> None:
    two[1].freeze()
    check_said(roles, UNREACHABLE)
    two[1].wake()
    check_nothing_left(two)


def test_a_role_that_is_frozen_while_its_host_is_not(two: list[Host], roles: dict[str, Command]) -> None:
    two[1].processes()[0].suspend()
    frozen = rf"(trainer 1|worker 0) \(host host-1, pid \d+\) is frozen: {SILENCE}{STEP}"
    check_said(roles, f"{frozen}; its log may have the cause")
    two[1].wake()
    check_nothing_left(two)


def test_a_host_of_the_master_that_was_stopped_accuses_nobody(
    two: list[Host], roles: dict[str, Command]
) -> None:
    two[0].freeze()
    assert eventually(lambda: not two[1].processes(), SECONDS), "who hears nothing of the master ends"
    two[0].wake()
    unheard = rf"it had received nothing from it for {BEAT_SECONDS} s \(cluster\.heartbeat_timeout_seconds\)"
    who = r"(trainer 1|worker 0) \(host host-1, pid \d+\) has ended"
    check_said(roles, f"the master was stopped, or out of reach: {who}, since {unheard}{STEP}", OUT_OF_REACH)
    check_nothing_left(two)

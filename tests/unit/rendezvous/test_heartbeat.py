"""Heartbeats: which roles are considered gone or frozen, and how soon."""

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import cast

import pytest
from support.commands import eventually
from support.rendezvous import ACCEPTANCE, SECONDS, WORKER, Meeting, meeting

from hybrid.errors import ClusterError, ConfigError
from hybrid.topology import Role, RoleKind
from workers.exit_codes import ExitCode, StopMessage
from workers.rendezvous.heartbeat import (
    ACCEPTED,
    HEARTBEATS,
    ConnectedRole,
    HeartbeatInterval,
    HeartbeatMonitor,
    HeartbeatSender,
    Registration,
    own_versions,
    register,
)
from workers.rendezvous.interrupt import LostHostError, LostRoleError, StoppedError
from workers.rendezvous.secure_channel import Channel, MasterChannel

TIMEOUT = 0.5
TRAINER = Role(RoleKind.TRAINER, 1)
HERE = ConnectedRole("trainer 1", "here", 7, "127.0.0.1", is_local=True)


def introduced(opened: Meeting) -> Channel:
    """A role that has said who it is, and says nothing more."""
    channel = opened.channel()
    channel.send(HEARTBEATS, Registration("worker 0", "here", 7, own_versions()).packed())
    assert channel.receive() == [ACCEPTED, ACCEPTANCE.packed()]
    return channel


@pytest.fixture
def await_beats(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Wait until some more heartbeats have been answered."""
    beats, receive = [0], Channel.receive

    def counted(channel: Channel, due_seconds: float = 0.0) -> list[bytes]:
        message = receive(channel, due_seconds)
        beats[0] += due_seconds < 0  # as those of a pulse are due
        return message

    def wait() -> None:
        enough = beats[0] + 10
        assert eventually(lambda: beats[0] >= enough, SECONDS)

    monkeypatch.setattr(Channel, "receive", counted)
    return wait


def test_a_role_that_leaves_is_not_lost(await_beats: Callable[[], None]) -> None:
    """Nor does it hear of anything, when the master says that all is done."""
    with meeting() as opened, opened.store() as store:
        with opened.pulse():
            await_beats()
            store.set("stop", str(StopMessage()))
            await_beats()
        opened.rendezvous.await_departures(SECONDS)
    assert (opened.lost, opened.heard) == ([], [])


def test_a_role_that_registers_as_the_run_fails_gets_the_reason() -> None:
    """The master stays for whoever has proved the secret and has not said yet who it is."""
    failure = StopMessage(ExitCode.FAILED, "out of luck")
    with meeting() as opened, closing(opened.channel()) as arriving, opened.store() as store:
        stopping = threading.Thread(target=opened.rendezvous.stop, args=(failure, SECONDS))
        stopping.start()
        assert store.get("stop").decode() == str(failure)
        assert stopping.is_alive()
        register(arriving, Registration.of(WORKER))
        with HeartbeatSender(arriving, opened.heard.append):
            assert eventually(lambda: opened.heard, SECONDS)
            assert stopping.is_alive()
        stopping.join(SECONDS)
        assert not stopping.is_alive()
    assert [str(each) for each in opened.heard] == ["stopped by the master: out of luck"]


def test_a_silent_role_is_frozen() -> None:
    with meeting(TIMEOUT) as opened:
        channel = introduced(opened)
        assert eventually(lambda: opened.lost, SECONDS)
        rule = f"no heartbeat for {TIMEOUT} s (cluster.heartbeat_timeout_seconds)"
        assert [str(error) for error in opened.lost] == [f"worker 0 (host here, pid 7) is frozen: {rule}"]
        assert isinstance(opened.lost[0], LostRoleError)
        channel.close()


def test_a_closed_connection_is_a_lost_role() -> None:
    with meeting() as opened:
        introduced(opened).close()
        assert eventually(lambda: opened.lost, SECONDS)
        assert [str(error) for error in opened.lost] == ["lost worker 0 (host here, pid 7)"]


def test_a_failed_role_reports_its_error() -> None:
    with meeting() as opened:
        for index, (error, words) in enumerate(
            (
                (ConfigError("a.b", "is wrong"), "a.b: is wrong"),
                (KeyboardInterrupt(), "interrupted"),
            )
        ):
            with pytest.raises(type(error)):
                with opened.pulse(Role(RoleKind.WORKER, index)):
                    raise error
            opened.rendezvous.await_departures(SECONDS)
            assert str(opened.lost.pop()).endswith(f") has ended: {words}")
        with pytest.raises(StoppedError):
            with opened.pulse(TRAINER):
                raise StoppedError("the master knows")
        opened.rendezvous.await_departures(SECONDS)
        assert opened.lost == []


def test_other_roles_get_the_name_of_a_lost_role() -> None:
    with meeting() as opened, opened.store() as store:
        with opened.pulse(TRAINER):
            introduced(opened).close()
            # The main thread of the master would say it first, if it could.
            assert eventually(lambda: opened.heard, SECONDS)
        reason = "lost worker 0 (host here, pid 7)"
        assert [str(error) for error in opened.heard] == [f"stopped by the master: {reason}"]
        assert isinstance(opened.heard[0], StoppedError)
        assert [store.get(key) for key in ("stop", "verdict")] == [
            str(StopMessage(ExitCode.AGAIN, reason)).encode()
        ] * 2


def test_a_lost_master_is_reported() -> None:
    with meeting() as opened, opened.pulse():
        opened.rendezvous.__exit__(None, None, None)
        assert eventually(lambda: opened.heard, SECONDS)
    assert str(opened.heard[0]).startswith("the master went away: ")
    assert isinstance(opened.heard[0], StoppedError)


def test_a_frozen_master_is_reported() -> None:
    with meeting() as opened, opened.pulse(patience_seconds=TIMEOUT), opened.frozen():
        assert eventually(lambda: opened.heard, SECONDS)
    rule = f"no heartbeat for {TIMEOUT} s (cluster.heartbeat_timeout_seconds)"
    assert [str(error) for error in opened.heard] == [f"the master is frozen: {rule}"]
    assert not isinstance(opened.heard[0], StoppedError)


def test_a_lost_or_frozen_master_is_reported_during_registration() -> None:
    with meeting() as opened:
        channel = opened.channel(patience_seconds=TIMEOUT)
        with opened.frozen(), pytest.raises(ClusterError, match=r"^the master is frozen: no heartbeat"):
            register(channel, Registration.of(TRAINER))
        channel.close()
        channel = opened.channel()
        opened.rendezvous.__exit__(None, None, None)
        with pytest.raises(StoppedError, match=r"^the master went away: "):
            register(channel, Registration.of(TRAINER))
        channel.close()


def no_signal(number: int) -> None:
    """Nobody is asked to stop here."""
    raise AssertionError(number)


RHYTHM = HeartbeatInterval(7.0)


def elsewhere(role: str, host: str) -> ConnectedRole:
    return ConnectedRole(role, host, 7, f"address of {host}", is_local=False)


T0, W1 = HERE, ConnectedRole("worker 1", "here", 8, "127.0.0.1", is_local=True)
T1, W0, W3 = elsewhere("trainer 1", "b"), elsewhere("worker 0", "b"), elsewhere("worker 3", "b")
W2 = elsewhere("worker 2", "c")
SILENT = "no heartbeat for 7 s (cluster.heartbeat_timeout_seconds)"
HOST_B = f"host b (trainer 1, worker 0) is unreachable: {SILENT}"


class Script:
    """A role that in each turn is (a)live, silent (.), (g)one, or ends since it has heard nothing (u)."""

    def __init__(self, letters: str) -> None:
        self._letters = iter(letters)
        self._messages = asyncio.Queue[bytes]()

    async def send(self, *fields: bytes) -> None: ...

    async def receive(self) -> list[bytes]:
        if (message := await self._messages.get()) == b"gone":
            raise EOFError
        return [message, b""]

    def go_on(self) -> None:
        words = {"a": b"alive", "g": b"gone", "u": b"unheard"}
        if (word := words.get(next(self._letters, "."))) is not None:
            self._messages.put_nowait(word)


async def what_is_told(roles: dict[ConnectedRole, str]) -> list[LostRoleError]:
    """What a watch tells of roles within twelve turns, whose timeout is seven."""
    lost: list[LostRoleError] = []
    watch = HeartbeatMonitor(RHYTHM, lost.append, no_signal)
    scripts = {who: Script(letters) for who, letters in roles.items()}
    num_turns, loop_turn = 0, asyncio.sleep

    async def sleep(seconds: float) -> None:
        nonlocal num_turns
        if seconds == RHYTHM.turn_seconds:
            num_turns += 1
            for script in scripts.values():
                script.go_on()
        for _ in range(10):  # enough for messages to be heard
            await loop_turn(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        tasks = [asyncio.create_task(watch.count_silence())]
        for who, script in scripts.items():
            tasks.append(
                asyncio.create_task(watch.monitor(cast(MasterChannel, script), who, (), lambda: b""))
            )
        while num_turns < 12:
            await loop_turn(0)
    for task in tasks:
        task.cancel()
    return lost


@pytest.mark.parametrize(
    ("roles", "told"),
    [
        pytest.param({T0: "a" * 12, T1: "aaa", W0: "aaa"}, [HOST_B], id="a host is named with its roles"),
        pytest.param({T0: "a" * 12, T1: "aaa", W0: "aa"}, [HOST_B], id="signs are some turns apart"),
        pytest.param(
            {T1: "a" * 12, W0: "aaa"}, [f"worker 0 (host b, pid 7) is frozen: {SILENT}"], id="its host lives"
        ),
        pytest.param(
            {T1: "aaaaaa", W0: "aaa"},
            [f"worker 0 (host b, pid 7) is frozen: {SILENT}"],
            id="its host has lived for longer",
        ),
        pytest.param(
            {T0: "aaa", W1: "aaa"},
            [f"{who} is frozen: {SILENT}" for who in (T0, W1)],
            id="the own host is in reach",
        ),
        pytest.param(
            {T0: "a" * 12, W0: "aaa", W2: "aaa"},
            [f"host b (worker 0) and host c (worker 2) are unreachable: {SILENT}"],
            id="two hosts",
        ),
        pytest.param(
            {T0: "a" * 12, T1: "aaag", W0: "aaag", W2: "a" * 12},
            ["lost host b (trainer 1, worker 0)"] * 2,
            id="a host is gone",
        ),
        pytest.param({T1: "a" * 12, W0: "aaag"}, ["lost worker 0 (host b, pid 7)"], id="a role is gone"),
        pytest.param(
            {T1: "a" * 12, W0: "aaag", W3: "aaag"},
            [f"lost {who}" for who in (W0, W3)],
            id="two roles are gone",
        ),
        pytest.param({T0: "aaag", W1: "aaag"}, [f"lost {who}" for who in (T0, W1)], id="roles of this host"),
        pytest.param(
            {T0: "a" * 12, W0: "aaau"},
            [
                "the master was stopped, or out of reach: worker 0 (host b, pid 7) has ended, since it had "
                "received nothing from it for 7 s (cluster.heartbeat_timeout_seconds)"
            ],
            id="the master was stopped",
        ),
    ],
)
def test_lost_roles_and_hosts_are_named(roles: dict[ConnectedRole, str], told: list[str]) -> None:
    lost = asyncio.run(what_is_told(roles))
    assert [str(error) for error in lost] == told
    assert [isinstance(error, LostHostError) for error in lost] == [
        "host b (t" in each or "are unreach" in each or "was stopped" in each for each in told
    ]


def test_a_stopped_master_learns_why_a_role_ended() -> None:
    """A master that was stopped hears it when it goes on, and knows that it was no failure of the role's."""
    with meeting() as opened, opened.pulse(patience_seconds=TIMEOUT):
        with opened.frozen():
            assert eventually(lambda: opened.heard, SECONDS)
        assert eventually(lambda: opened.lost, SECONDS)
    who = rf"worker 0 \(host \S+, pid {os.getpid()}\) has ended"
    assert re.match(
        f"the master was stopped: {who}, since it had received nothing from it", str(opened.lost[0])
    )


def test_a_stopped_master_considers_no_role_frozen() -> None:
    """A time in which its process did nothing is one turn at most."""

    rhythm, lost = HeartbeatInterval(0.1), list[ClusterError]()

    async def be_stopped() -> None:
        watch, silent = (
            HeartbeatMonitor(rhythm, lost.append, no_signal),
            cast(MasterChannel, Script("")),
        )
        tasks = [
            asyncio.create_task(watch.monitor(silent, HERE, (), lambda: b"")),
            asyncio.create_task(watch.count_silence()),
        ]
        await asyncio.sleep(0)
        time.sleep(2 * rhythm.timeout_seconds)
        for _ in range(rhythm.turns - 1):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()

    asyncio.run(be_stopped())
    assert lost == []

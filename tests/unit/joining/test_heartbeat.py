"""Signs of life: who is taken for gone or frozen, how soon, and who is not."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import pytest
from support.commands import eventually
from support.rendezvous import SECONDS, Meeting, meeting

from hybrid.errors import ClusterError, ConfigError
from hybrid.topology import Role, RoleKind
from workers.joining.alarm import LostRoleError, StoppedError
from workers.joining.channel import Channel, MasterChannel
from workers.joining.heartbeat import LIFE, Pulse, Watch
from workers.joining.rhythm import Rhythm

TIMEOUT = 0.5
TRAINER = Role(RoleKind.TRAINER, 1)


def introduced(opened: Meeting) -> Channel:
    """A role that has said who it is, and says nothing more."""
    channel = opened.channel()
    channel.send(LIFE, b"worker 0", b"here", b"7")
    assert channel.receive() == [b""]
    return channel


@pytest.mark.parametrize("timeout", [0.1, 1.0, 5.0, 7.5, 10.0, 3600.0])
def test_several_signs_fit_into_the_timeout(timeout: float) -> None:
    rhythm = Rhythm(timeout)
    assert rhythm.turns >= 5
    assert rhythm.turn_seconds <= min(1.0, timeout / 5)
    assert rhythm.turns * rhythm.turn_seconds == pytest.approx(timeout)


def test_a_role_that_lives_and_leaves_is_never_lost() -> None:
    heard: list[ClusterError] = []
    with meeting(TIMEOUT) as opened:
        with opened.pulse(heard):
            time.sleep(2 * TIMEOUT)
        opened.rendezvous.await_left(SECONDS)
    assert (opened.lost, heard) == ([], [])


def test_a_role_that_says_nothing_is_frozen_within_the_timeout() -> None:
    with meeting(TIMEOUT) as opened:
        began = time.monotonic()
        channel = introduced(opened)
        assert eventually(lambda: opened.lost, SECONDS)
        seconds = time.monotonic() - began
        rule = f"no sign of life for {TIMEOUT} s (cluster.heartbeat_timeout_seconds)"
        assert [str(error) for error in opened.lost] == [f"worker 0 (host here, pid 7) is frozen: {rule}"]
        assert isinstance(opened.lost[0], LostRoleError)
        assert 0.5 * TIMEOUT < seconds < 2 * TIMEOUT
        opened.rendezvous.await_left(SECONDS)
        assert time.monotonic() - began < SECONDS, "nobody waits for one who is frozen"
        channel.close()


def test_a_role_that_is_gone_is_lost_at_once() -> None:
    with meeting() as opened:
        introduced(opened).close()
        assert eventually(lambda: opened.lost, SECONDS)
        assert [str(error) for error in opened.lost] == ["lost worker 0 (host here, pid 7)"]


def test_a_place_is_claimed_once() -> None:
    heard: list[ClusterError] = []
    with meeting(TIMEOUT) as opened, opened.pulse(heard), opened.store() as store:
        assert not store.check(["twice/worker 0"])
        with pytest.raises(ClusterError, match=r"^worker 0 is already taken in this cluster: was it started"):
            opened.pulse([])
        assert store.check(["twice/worker 0"])
        with opened.pulse([], TRAINER):
            pass
        assert (opened.lost, heard) == ([], []), "the first goes on"


def test_a_role_that_fails_says_why() -> None:
    with meeting() as opened:
        for index, (error, words) in enumerate(
            (
                (ConfigError("a.b", "is wrong"), "a.b: is wrong"),
                (KeyboardInterrupt(), "interrupted"),
            )
        ):
            with pytest.raises(type(error)):
                with opened.pulse([], Role(RoleKind.WORKER, index)):
                    raise error
            opened.rendezvous.await_left(SECONDS)
            assert str(opened.lost.pop()).endswith(f") has ended: {words}")
        with pytest.raises(StoppedError):
            with opened.pulse([], TRAINER):
                raise StoppedError("the master knows")
        opened.rendezvous.await_left(SECONDS)
        assert opened.lost == []


def test_all_others_hear_who_was_lost_and_a_role_that_is_told_only_repeats_it() -> None:
    heard: list[ClusterError] = []
    with meeting(TIMEOUT) as opened, opened.store() as store:
        with opened.pulse(heard, TRAINER):
            introduced(opened).close()
            # The main thread of the master would say it first, if it could.
            assert eventually(lambda: heard, SECONDS)
        reason = "lost worker 0 (host here, pid 7)"
        assert [str(error) for error in heard] == [f"stopped by the master: {reason}"]
        assert isinstance(heard[0], StoppedError)
        assert [store.get(key) for key in ("stop", "verdict")] == [reason.encode()] * 2


def test_the_first_reason_to_stop_is_the_one_that_roles_hear() -> None:
    with meeting(TIMEOUT) as opened, opened.store() as store:
        store.set("verdict", "go")
        opened.rendezvous.stop("first", 0)
        opened.rendezvous.stop("second", 0)
        assert [store.get(key) for key in ("stop", "verdict")] == [b"first", b"go"]
        heard: list[ClusterError] = []
        with opened.pulse(heard):
            assert eventually(lambda: heard, SECONDS)
        assert str(heard[0]) == "stopped by the master: first"


def test_a_word_that_all_is_done_alarms_nobody() -> None:
    heard: list[ClusterError] = []
    with meeting(TIMEOUT) as opened, opened.store() as store:
        with opened.pulse(heard):
            store.set("stop", "done")
            time.sleep(TIMEOUT)
    assert (opened.lost, heard) == ([], [])


def test_a_master_that_is_gone_or_frozen_is_noticed() -> None:
    gone: list[ClusterError] = []
    with meeting(TIMEOUT) as opened, opened.pulse(gone):
        opened.rendezvous.__exit__(None, None, None)
        assert eventually(lambda: gone, SECONDS)
    assert str(gone[0]).startswith("the master went away: ")
    assert isinstance(gone[0], StoppedError)


def test_a_master_that_is_frozen_is_noticed_within_the_timeout() -> None:
    heard: list[ClusterError] = []
    with meeting(TIMEOUT) as opened, opened.pulse(heard):
        began = time.monotonic()
        with opened.frozen():
            assert eventually(lambda: heard, SECONDS)
        assert time.monotonic() - began < 2 * TIMEOUT
    rule = f"no sign of life for {TIMEOUT} s (cluster.heartbeat_timeout_seconds)"
    assert [str(error) for error in heard] == [f"the master is frozen: {rule}"]
    assert not isinstance(heard[0], StoppedError)


def test_a_master_that_is_gone_or_frozen_before_a_role_has_claimed_its_place_is_noticed() -> None:
    with meeting(TIMEOUT) as opened:
        channel = opened.channel()
        with opened.frozen(), pytest.raises(ClusterError, match=r"^the master is frozen: no sign of life"):
            Pulse(channel, TRAINER, opened.rhythm, opened.lost.append)
        channel = opened.channel()
        opened.rendezvous.__exit__(None, None, None)
        with pytest.raises(StoppedError, match=r"^the master went away: "):
            Pulse(channel, TRAINER, opened.rhythm, opened.lost.append)


def test_a_master_that_was_stopped_itself_takes_nobody_for_frozen() -> None:
    with meeting(TIMEOUT) as opened:
        channel = introduced(opened)
        with opened.frozen():
            time.sleep(2 * TIMEOUT)
        channel.send(b"alive")
        assert channel.receive() == [b""]
        assert opened.lost == []
        channel.close()


def test_a_clock_that_is_set_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[ClusterError] = []
    now = time.time
    with meeting(TIMEOUT) as opened, opened.pulse(heard):
        for days in (1, -1):
            monkeypatch.setattr(time, "time", lambda days=days: now() + days * 86_400)
            time.sleep(TIMEOUT / 2)
        assert (opened.lost, heard) == ([], [])


class Silent:
    """A role that says nothing more."""

    async def send(self, *parts: bytes) -> None: ...

    async def receive(self) -> list[bytes]:
        await asyncio.Event().wait()
        return []


def test_a_role_is_frozen_after_just_the_turns_of_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep, rhythm = asyncio.sleep, Rhythm(7.0)
    turns: list[float] = []
    lost: list[tuple[int, str]] = []

    async def turn(seconds: float) -> None:
        turns.append(seconds)
        await sleep(0)

    async def listen() -> None:
        watch = Watch(rhythm, lambda error: lost.append((len(turns), str(error))))
        attending = asyncio.create_task(watch.attend(cast(MasterChannel, Silent()), "trainer 1", lambda: ""))
        await sleep(0)
        counting = asyncio.create_task(watch.count())
        while not lost and len(turns) < 20:
            await sleep(0)
        for task in (attending, counting):
            task.cancel()

    monkeypatch.setattr(asyncio, "sleep", turn)
    asyncio.run(listen())
    assert lost == [(7, rhythm.frozen("trainer 1"))]
    assert set(turns) == {1.0}

"""Registration and heartbeats: which roles are members, and which are considered gone or frozen."""

import dataclasses
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from importlib import metadata

import pytest
from support.commands import eventually
from unit.rendezvous.running import CONFIG, SECONDS, OpenRendezvous, Quick, open_rendezvous, registration

from hybrid.config import ColumnSection
from hybrid.errors import ClusterError, ConfigError, HybridError
from hybrid.topology import Role, RoleKind
from workers.exit_codes import ExitCode, StopMessage
from workers.rendezvous.heartbeat import HeartbeatSender, own_versions, register
from workers.rendezvous.interrupt import LostRoleError, StoppedError
from workers.rendezvous.secure_channel import LARGEST_FRAME, Channel, MasterChannel

TIMEOUT = 0.5
TRAINER = Role(RoleKind.TRAINER, 1)
IDLE = str(registration())  # a role of this process that sends no heartbeats


def registered(opened: OpenRendezvous) -> Channel:
    """Return the channel of a role that has registered, and sends no heartbeats."""
    channel = opened.channel()
    register(channel, registration())
    return channel


def test_configuration_larger_than_a_frame_is_received() -> None:
    columns = {f"feature_{i:02000}": ColumnSection(kind="buckets") for i in range(600)}
    config = dataclasses.replace(CONFIG, columns=columns)
    with open_rendezvous(config=config) as opened, closing(opened.channel()) as channel:
        text = register(channel, registration())
    assert len(text) > LARGEST_FRAME
    assert text.count("buckets") == len(columns)


@pytest.mark.parametrize("name", ["trainer 2", "worker 02", "master", "bystander 0", ""])
def test_unknown_role_is_rejected(name: str) -> None:
    with open_rendezvous() as opened, closing(opened.channel()) as channel:
        with pytest.raises(HybridError, match=rf"{name} .* 2 trainer"):
            register(channel, dataclasses.replace(registration(), role=name))
        assert opened.lost == []


def test_other_versions_are_reported_on_both_sides() -> None:
    with open_rendezvous() as opened, closing(opened.channel()) as channel:
        message = r"^worker 0 on host b has torch 1\.0, the master "
        with pytest.raises(HybridError, match=message):
            register(channel, dataclasses.replace(registration(host="b"), versions="torch 1.0"))
        assert re.match(message, str(opened.lost[0]))


def test_builds_for_other_devices_have_the_same_version(monkeypatch: pytest.MonkeyPatch) -> None:
    python = ".".join(map(str, sys.version_info[:2]))
    for build in ("", "+cpu", "+cu128"):
        monkeypatch.setattr(metadata, "version", lambda _, build=build: f"2.13.0{build}")
        assert own_versions().endswith(f", torch 2.13.0, Python {python}")


def test_second_registration_does_not_end_the_run() -> None:
    with open_rendezvous() as opened, opened.heartbeats():
        with closing(opened.channel()) as second:
            with pytest.raises(ClusterError, match=r"^worker 0 "):
                register(second, dataclasses.replace(registration(), versions=""))
        assert (opened.lost, opened.failures) == ([], [])


@pytest.fixture
def await_beats(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that waits for ten responses to heartbeats."""
    beats, receive = [0], Channel.receive

    def counted(channel: Channel, due_seconds: float = 0.0) -> list[bytes]:
        message = receive(channel, due_seconds)
        beats[0] += due_seconds < 0  # as responses to heartbeats are due
        return message

    def wait() -> None:
        enough = beats[0] + 10
        assert eventually(lambda: beats[0] >= enough, SECONDS)

    monkeypatch.setattr(Channel, "receive", counted)
    return wait


def test_a_role_that_leaves_is_not_lost(await_beats: Callable[[], None]) -> None:
    """The end of a run is no failure for it either."""
    with open_rendezvous() as opened, opened.store() as store:
        with opened.heartbeats():
            await_beats()
            store.set("stop", "0")
            await_beats()
        opened.rendezvous.await_departures(SECONDS)
    assert (opened.lost, opened.failures) == ([], [])


def test_a_role_that_registers_as_the_run_fails_gets_the_reason() -> None:
    """The master waits for authenticated peers that have not registered yet."""
    failure = StopMessage(ExitCode.FAILED, "out of luck")
    with open_rendezvous() as opened, closing(opened.channel()) as arriving, opened.store() as store:
        store.set("any", "")  # the response comes after the master has authenticated both connections
        stopping = threading.Thread(target=opened.rendezvous.stop, args=(failure, SECONDS))
        stopping.start()
        register(arriving, registration())
        with HeartbeatSender(arriving, opened.failures.append):
            assert eventually(lambda: opened.failures, SECONDS)
            assert stopping.is_alive()
        stopping.join(SECONDS)
        assert not stopping.is_alive()
    assert [str(each) for each in opened.failures] == ["stopped by the master: out of luck"]


def test_a_silent_role_is_frozen() -> None:
    with open_rendezvous(TIMEOUT) as opened, closing(registered(opened)):
        assert eventually(lambda: opened.lost, SECONDS)
        rule = f"no heartbeat for {TIMEOUT} s (cluster.heartbeat_timeout_seconds)"
        assert [str(error) for error in opened.lost] == [f"{IDLE} is frozen: {rule}"]
        assert isinstance(opened.lost[0], LostRoleError)


@pytest.mark.parametrize("is_master", [False, True])
def test_a_failed_thread_of_heartbeats_ends_the_run(is_master: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[bytes]:
        raise MemoryError("no more")

    with open_rendezvous() as opened, opened.heartbeats():
        monkeypatch.setattr(MasterChannel if is_master else Channel, "receive", fail)
        assert eventually(lambda: opened.lost and opened.failures, SECONDS)
    reports = opened.lost if is_master else opened.failures
    assert str(reports[0]).endswith("failed: MemoryError: no more")


def test_a_failed_role_reports_its_error() -> None:
    with open_rendezvous() as opened:
        for index, (error, text) in enumerate(
            ((ConfigError("a.b", "is wrong"), "a.b: is wrong"), (KeyboardInterrupt(), "interrupted"))
        ):
            with pytest.raises(type(error)):
                with opened.heartbeats(Role(RoleKind.WORKER, index)):
                    raise error
            opened.rendezvous.await_departures(SECONDS)
            assert str(opened.lost.pop()).endswith(f") has ended: {text}")
        with pytest.raises(StoppedError):
            with opened.heartbeats(TRAINER):
                raise StoppedError("the master knows")
        opened.rendezvous.await_departures(SECONDS)
        assert opened.lost == []


def test_a_closed_connection_is_a_lost_role_which_the_others_learn() -> None:
    with open_rendezvous() as opened:
        with opened.heartbeats(TRAINER):
            registered(opened).close()
            # The master's main thread would report it first, if there were one.
            assert eventually(lambda: opened.failures, SECONDS)
        reason = f"lost {IDLE}"
        assert [str(error) for error in opened.lost] == [reason]
        assert [str(error) for error in opened.failures] == [f"stopped by the master: {reason}"]
        assert isinstance(opened.failures[0], StoppedError)


def test_a_lost_master_is_reported() -> None:
    with open_rendezvous() as opened, opened.heartbeats(), closing(opened.channel()) as channel:
        opened.rendezvous.__exit__(None, None, None)
        assert eventually(lambda: opened.failures, SECONDS)
        assert str(opened.failures[0]).startswith("the master went away: ")
        assert isinstance(opened.failures[0], StoppedError)
        with pytest.raises(StoppedError, match=r"^the master "):
            register(channel, registration(TRAINER))


def test_a_frozen_master_is_reported_and_learns_it_later() -> None:
    """A stopped master learns, when it continues, why the role has ended."""
    with open_rendezvous() as opened, closing(opened.channel(silence_seconds=TIMEOUT)) as channel:
        with opened.heartbeats(silence_seconds=TIMEOUT), opened.frozen():
            with pytest.raises(ClusterError, match=r"master .*frozen"):
                register(channel, registration(TRAINER))
            assert eventually(lambda: opened.failures, SECONDS)
        assert eventually(lambda: opened.lost, SECONDS)
    rule = f"no heartbeat for {TIMEOUT} s (cluster.heartbeat_timeout_seconds)"
    assert [str(error) for error in opened.failures] == [f"the master is frozen: {rule}"]
    assert not isinstance(opened.failures[0], StoppedError)
    assert str(opened.lost[0]) == f"{IDLE} has ended: the master is frozen: {rule}"


def test_a_silent_role_on_another_host_may_be_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.create_connection

    def connect_from_another_address(address: tuple[str, int], timeout: float) -> socket.socket:
        return connect(address, timeout, ("127.0.0.2", 0))

    monkeypatch.setattr(socket, "create_connection", connect_from_another_address)
    with open_rendezvous(TIMEOUT) as opened, closing(registered(opened)):
        assert eventually(lambda: opened.lost, SECONDS)
    assert str(opened.lost[0]).startswith(f"{IDLE} is frozen or unreachable: no heartbeat for {TIMEOUT} s")


def test_a_stopped_master_considers_no_role_frozen() -> None:
    """Time in which its process was stopped counts as one turn at most."""
    with open_rendezvous(TIMEOUT) as opened:
        channel = opened.channel()
        channel.interval = Quick(60.0)
        register(channel, registration())
        with HeartbeatSender(channel, opened.failures.append):
            with opened.frozen():
                time.sleep(2 * TIMEOUT)
            time.sleep(TIMEOUT)
    assert opened.lost == []

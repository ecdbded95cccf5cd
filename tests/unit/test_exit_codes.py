"""Exit codes of failures, and signals that stop a run."""

import signal
import time
from collections.abc import Iterator

import pytest

from hybrid import transport
from hybrid.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    HybridError,
    OutageError,
    StorageError,
)
from hybrid.topology import Role, RoleKind
from workers.cli import commands, main
from workers.exit_codes import (
    HANDLED_SIGNALS,
    STOP_REQUEST,
    STOP_SIGNALS,
    WARNING,
    ExitCode,
    Interrupt,
    ReportedError,
    StopMessage,
    StopRequest,
    exit_code,
    forwarding_signals,
)
from workers.rendezvous.interrupt import EndedRoleError, StoppedError

WORKER = Role(RoleKind.WORKER)
ALL = (*HANDLED_SIGNALS, STOP_REQUEST)
SECONDS = 10.0


def remote(kind: str) -> transport.RemoteError:
    return transport.RemoteError(WORKER, transport.Failure("it fails", kind, True, "there", False))


def caused_by(error: HybridError, cause: Exception) -> HybridError:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "before_a_step", "later"),
    [
        (ConfigError("train.epochs", "is bad"), 1, 1),
        (DataError("no such file"), 1, 1),
        (remote("ConfigError"), 1, 1),
        (StorageError("no permission"), 1, 1),
        (caused_by(CheckpointError("not written"), StorageError("no permission")), 1, 1),
        (caused_by(CheckpointError("not written"), KeyError("x")), 1, 1),
        (OutageError("down"), 75, 75),
        (caused_by(CheckpointError("not written"), OutageError("down")), 75, 75),
        (caused_by(CheckpointError("not written"), remote("OutageError")), 75, 75),
        (remote("OutageError"), 75, 75),
        (KeyError("x"), 1, 75),
        (remote("KeyError"), 1, 75),
        (ClusterError("missing after 60 s"), 75, 75),
        (transport.LostError(WORKER, "no answer"), 75, 75),
        (remote("ClusterError"), 75, 75),
        (StoppedError("stopped by the master: lost worker 0"), 75, 75),
        (StoppedError("stopped by the master: a.b: is bad", ExitCode.FAILED), 1, 1),
        (EndedRoleError("worker 0 has ended: a.b: is bad", ExitCode.FAILED), 1, 1),
        (ReportedError("the run is over", ExitCode.DONE), 0, 0),
        (KeyboardInterrupt(), 130, 130),
        (Interrupt(ExitCode.TERMINATED), 143, 143),
    ],
    ids=repr,
)
def test_exit_code_of_an_error(error: BaseException, before_a_step: int, later: int) -> None:
    assert (exit_code(error, has_stepped=False), exit_code(error)) == (before_a_step, later)


@pytest.mark.parametrize(
    "message",
    [StopMessage(), StopMessage(ExitCode.AGAIN, "lost worker 0: a 1 b"), StopMessage(ExitCode.AGAIN)],
)
def test_stop_message_is_parsed_as_it_was_sent(message: StopMessage) -> None:
    assert StopMessage.parse(str(message)) == message


@pytest.fixture
def passed_on() -> Iterator[list[int]]:
    """Return the signals that reach the handlers from before."""
    numbers: list[int] = []
    previous = {number: signal.signal(number, lambda number, _: numbers.append(number)) for number in ALL}
    yield numbers
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", STOP_SIGNALS, ids=lambda number: number.name)
def test_first_signal_stops_and_the_second_is_passed_on(first: signal.Signals, passed_on: list[int]) -> None:
    requested: list[ExitCode] = []
    stop = StopRequest(SECONDS, lambda: requested.append(stop.code))
    with stop.handling_signals():
        assert not stop.is_requested
        signal.raise_signal(first)
        assert (stop.is_requested, requested, passed_on) == (True, [stop.code], [])
        signal.raise_signal(signal.SIGTERM)
        assert passed_on == [signal.SIGTERM]
    signal.raise_signal(first)
    assert (requested, passed_on) == ([128 + first], [signal.SIGTERM, first])


@pytest.mark.parametrize(
    ("first", "code"),
    [(STOP_REQUEST, ExitCode.TERMINATED), (WARNING, ExitCode.AGAIN)],
    ids=["requested", "warned"],
)
def test_forwarded_requests_do_not_count(first: signal.Signals, code: ExitCode, passed_on: list[int]) -> None:
    """A scheduler sends its signal to all roles, and each role forwards it."""
    stop = StopRequest(SECONDS)
    with stop.handling_signals():
        for number in (first, first, signal.SIGTERM, STOP_REQUEST, WARNING):
            signal.raise_signal(number)
        assert (stop.code, passed_on) == (code, [])
        signal.raise_signal(signal.SIGINT)
        assert passed_on == [signal.SIGINT]


def test_a_role_forwards_signals_and_a_second_ctrl_c_ends_it(passed_on: list[int]) -> None:
    forwarded: list[int] = []
    with forwarding_signals(forwarded.append):
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, WARNING):
            signal.raise_signal(number)
        assert (forwarded, passed_on) == ([signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, WARNING], [])
        signal.raise_signal(signal.SIGINT)
        assert passed_on == [signal.SIGINT]
    signal.raise_signal(signal.SIGTERM)
    assert passed_on == [signal.SIGINT, signal.SIGTERM]


@pytest.mark.usefixtures("passed_on")
def test_ignored_signals_stay_ignored() -> None:
    stop = StopRequest(SECONDS)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    with stop.handling_signals():
        signal.raise_signal(signal.SIGHUP)
    assert not stop.is_requested
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.usefixtures("passed_on")
def test_handlers_set_by_the_second_signal_stay() -> None:
    stop = StopRequest(SECONDS)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGINT, signal.SIG_IGN))
    with stop.handling_signals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def wait_after_request(stop: StopRequest) -> None:
    with stop.handling_signals():
        signal.raise_signal(signal.SIGINT)
        time.sleep(SECONDS)


@pytest.mark.usefixtures("passed_on")
def test_a_stop_has_a_time_limit() -> None:
    stop = StopRequest(0.05)
    with pytest.raises(KeyboardInterrupt, match=r"cluster\.timeout_seconds"):
        wait_after_request(stop)


@pytest.mark.usefixtures("passed_on")
def test_time_limit_ends_with_the_block() -> None:
    before = signal.getsignal(signal.SIGALRM)
    stop = StopRequest(0.05)
    with stop.handling_signals():
        signal.raise_signal(signal.SIGINT)
    time.sleep(0.1)
    assert signal.getsignal(signal.SIGALRM) == before


@pytest.mark.usefixtures("passed_on")
def test_signals_are_ignored_while_an_interrupted_command_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(options: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(commands, "config_command", stop)
    with pytest.raises(SystemExit) as end:
        main(["config"])
    assert end.value.code == ExitCode.INTERRUPTED

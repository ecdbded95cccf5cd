"""Being asked to stop: the first signal is noted, the second is for whom it was, and the time is bounded."""

import signal
import time
from collections.abc import Iterator

import pytest

from workers.exit_codes import WARNING, ExitCode
from workers.signals import HANDLED_SIGNALS, STOP_REQUEST, STOP_SIGNALS, StopRequest, forwarding_signals

ALL = (*HANDLED_SIGNALS, STOP_REQUEST)
SECONDS = 10.0


@pytest.fixture(autouse=True)
def heard() -> Iterator[list[int]]:
    """The signals that nobody has noted."""
    numbers: list[int] = []
    previous = {number: signal.signal(number, lambda number, _: numbers.append(number)) for number in ALL}
    yield numbers
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", STOP_SIGNALS, ids=lambda number: number.name)
def test_the_first_is_noted_and_the_second_is_not(first: signal.Signals, heard: list[int]) -> None:
    asked: list[ExitCode] = []
    stop = StopRequest(SECONDS, asked.append)
    with stop.handling_signals():
        assert not stop.is_requested
        signal.raise_signal(first)
        assert (stop.is_requested, asked, heard) == (True, [stop.code], [])
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    signal.raise_signal(first)
    assert (asked, heard) == ([128 + first], [signal.SIGTERM, first])


@pytest.mark.parametrize(
    ("first", "code"),
    [(STOP_REQUEST, ExitCode.TERMINATED), (WARNING, ExitCode.AGAIN)],
    ids=["requested", "warned"],
)
def test_what_is_not_for_this_process_alone_is_no_first_one(
    first: signal.Signals, code: ExitCode, heard: list[int]
) -> None:
    """A scheduler sends its signal to all roles; who hears it passes it on to who has heard it as well."""
    stop = StopRequest(SECONDS)
    with stop.handling_signals():
        for number in (first, first, signal.SIGTERM, STOP_REQUEST, WARNING):
            signal.raise_signal(number)
        assert (stop.code, heard) == (code, [])
        signal.raise_signal(signal.SIGINT)
        assert heard == [signal.SIGINT]


def test_a_role_passes_on_what_stops_it_and_ctrl_c_again_ends_it(heard: list[int]) -> None:
    passed: list[int] = []
    with forwarding_signals(passed.append):
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, WARNING):
            signal.raise_signal(number)
        assert (passed, heard) == ([signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, WARNING], [])
        signal.raise_signal(signal.SIGINT)
        assert heard == [signal.SIGINT]
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGINT, signal.SIGTERM]


def test_what_is_ignored_stays_so() -> None:
    stop = StopRequest(SECONDS)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    with stop.handling_signals():
        signal.raise_signal(signal.SIGHUP)
    assert not stop.is_requested
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_what_the_second_one_sets_stays_so() -> None:
    stop = StopRequest(SECONDS)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGINT, signal.SIG_IGN))
    with stop.handling_signals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def wait_after_it_was_asked(stop: StopRequest) -> None:
    with stop.handling_signals():
        signal.raise_signal(signal.SIGINT)
        time.sleep(SECONDS)


def test_it_may_not_take_longer_than_it_may() -> None:
    said = r"^the step or the checkpoint took longer than 0.05 s \(cluster.timeout_seconds\)$"
    stop = StopRequest(0.05)
    with pytest.raises(KeyboardInterrupt, match=said):
        wait_after_it_was_asked(stop)


def test_the_time_ends_with_the_block() -> None:
    before = signal.getsignal(signal.SIGALRM)
    stop = StopRequest(0.05)
    with stop.handling_signals():
        signal.raise_signal(signal.SIGINT)
    time.sleep(0.1)
    assert signal.getsignal(signal.SIGALRM) == before

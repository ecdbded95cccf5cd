"""Signals that stop a run: the first one saves it, the next one stops at once. Free of torch.

::

    launcher                          master                            other roles
    ────────                          ──────                            ───────────
    Ctrl-C: STOP_REQUEST ───────────► finishes its step, saves          ignore the signals
                                      sends the stop message ─────────► end
                             ◄─────── ends
    Ctrl-C again: kills all

    started by hand                   handles Ctrl-C itself
                                      receives the request with ◄────── Ctrl-C: request to the master
                                      the heartbeat, stops as above     Ctrl-C again: ends at once

A warning, SIGUSR1, has the same effect; a scheduler may send it to all processes and more than once.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from workers.exit_codes import WARNING, ExitCode, Interrupt

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HANDLED_SIGNALS = (*STOP_SIGNALS, WARNING)
# From the launcher, or another role, to the master: a signal that nobody else sends.
STOP_REQUEST = signal.SIGRTMAX


class StopRequest:
    """The request to stop a run, if there is one.

    Args:
        seconds: how long the run may take to stop.
        forward: called by the signal handler with the exit code.

    Attributes:
        is_requested: whether the run must stop.
        code: exit code of the process then.
    """

    def __init__(self, seconds: float, forward: Callable[[ExitCode], object] = lambda _: None) -> None:
        self.is_requested = False
        self.code = ExitCode.DONE
        self._has_direct_signal = False  # a signal for this process alone
        self._seconds = seconds
        self._forward = forward
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle the first signal in this block, and leave the next to its old handler; main thread only.

        Ignored signals stay ignored. A warning or a forwarded request counts as neither first nor next.

        Raises:
            Interrupt: the run takes too long to stop.
        """
        for number in (*HANDLED_SIGNALS, STOP_REQUEST):
            handler = signal.getsignal(number)
            if callable(handler):
                self._previous[number] = handler
                signal.signal(number, self._handle)
        alarm = signal.signal(signal.SIGALRM, self._give_up)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)
            for number, handler in self._previous.items():
                if signal.getsignal(number) == self._handle:  # the second signal may have changed it
                    signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_direct = number in STOP_SIGNALS
        if is_direct and self._has_direct_signal:
            self._previous[signal.Signals(number)](number, frame)
            return
        self._has_direct_signal |= is_direct
        if self.is_requested:
            return
        self.is_requested = True
        self.code = ExitCode.TERMINATED if number == STOP_REQUEST else ExitCode.of_signal(number)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        self._forward(self.code)

    def _give_up(self, number: int, frame: FrameType | None) -> None:
        raise Interrupt(
            self.code,
            f"the step or the checkpoint took longer than {self._seconds:g} s (cluster.timeout_seconds)",
        )


@contextmanager
def forwarding_signals(forward: Callable[[int], object]) -> Iterator[None]:
    """Forward signals to the master, which stops all roles, during this block; main thread only.

    The second Ctrl-C ends the role at once. A scheduler may send the other signals to all roles, and more
    than once. Ignored signals stay ignored.

    Args:
        forward: called with the number of a signal.
    """
    previous = {number: signal.getsignal(number) for number in HANDLED_SIGNALS}
    received = list[int]()

    def handle(number: int, frame: FrameType | None) -> None:
        before = previous[signal.Signals(number)]
        if number == signal.SIGINT and received and callable(before):
            before(number, frame)
        received.append(number)
        forward(number)

    for number, handler in previous.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) == handle:  # the second signal may have changed it
                signal.signal(number, handler)

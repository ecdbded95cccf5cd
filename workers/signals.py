"""Being asked to stop, by Ctrl-C, SIGTERM or SIGHUP: first in peace, then at once. Free of torch.

::

    launcher                          master                            other roles
    ────────                          ──────                            ───────────
    Ctrl-C: tells the master ───────► finishes its step, saves          ignore the signals
                                      says "done" ────────────────────► end
                             ◄─────── ends
    Ctrl-C again: ends all

    started by hand                   hears Ctrl-C itself
                                      hears of it by its signs of ◄──── Ctrl-C: tells the master
                                      life, and stops as above          Ctrl-C again: ends at once

A warning, SIGUSR1, asks for the same; it may come to all at once and as often as it likes.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from workers.exit_codes import WARNING, ExitCode, Interrupt

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HEARD = (*STOP_SIGNALS, WARNING)  # what a command hears that runs a cluster, or is part of one
# What the launcher, or another role, tells its master by: a signal that nobody else sends to all.
ASK_SIGNAL = signal.SIGRTMAX


class Stop:
    """Whether a run has been asked to stop.

    Args:
        seconds: how long it may take to stop in peace, once asked.
        ask: called with the code when it is asked, in a signal handler.

    Attributes:
        is_asked: whether it has been.
        code: what the process is to end with then.
    """

    def __init__(self, seconds: float, ask: Callable[[ExitCode], object] = lambda _: None) -> None:
        self.is_asked = False
        self.code = ExitCode.DONE
        self._has_heard = False  # a signal that was for this very process
        self._seconds = seconds
        self._ask = ask
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note the first signal in here, and leave the next to whom it was for; entered by the main thread.

        What is ignored stays so. What was not for this process alone, a warning or a word of another one, is
        no first signal, and no next.

        Raises:
            Interrupt: it has taken too long since it was asked.
        """
        for number in (*HEARD, ASK_SIGNAL):
            handler = signal.getsignal(number)
            if callable(handler):
                self._previous[number] = handler
                signal.signal(number, self._hear)
        alarm = signal.signal(signal.SIGALRM, self._give_up)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)
            for number, handler in self._previous.items():
                if signal.getsignal(number) == self._hear:  # the second signal may have changed it
                    signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        is_for_this = number in STOP_SIGNALS
        if is_for_this and self._has_heard:
            self._previous[signal.Signals(number)](number, frame)
            return
        self._has_heard |= is_for_this
        if self.is_asked:
            return
        self.is_asked = True
        self.code = ExitCode.TERMINATED if number == ASK_SIGNAL else ExitCode.of_signal(number)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        self._ask(self.code)

    def _give_up(self, number: int, frame: FrameType | None) -> None:
        raise Interrupt(
            self.code,
            f"the step or the checkpoint took longer than {self._seconds:g} s (cluster.timeout_seconds)",
        )


@contextmanager
def passing_on(ask: Callable[[int], object]) -> Iterator[None]:
    """Have the signals that stop a role ask its master in here, which stops all; entered by the main thread.

    Ctrl-C again ends the role at once. A scheduler may send the others to all, and more than once. What is
    ignored stays so.

    Args:
        ask: called with the number of a signal.
    """
    previous = {number: signal.getsignal(number) for number in HEARD}
    heard = list[int]()

    def hear(number: int, frame: FrameType | None) -> None:
        before = previous[signal.Signals(number)]
        if number == signal.SIGINT and heard and callable(before):
            before(number, frame)
        heard.append(number)
        ask(number)

    for number, handler in previous.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, hear)
    try:
        yield
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) == hear:  # the second signal may have changed it
                signal.signal(number, handler)

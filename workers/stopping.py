"""Being asked to stop, by Ctrl-C, SIGTERM or SIGHUP: first in peace, then at once. Free of torch.

::

    launcher                          master                            other roles
    ────────                          ──────                            ───────────
    Ctrl-C: tells the master ───────► finishes its step, saves          ignore the signals
                                      says "done" ────────────────────► end
                             ◄─────── ends
    Ctrl-C again: ends all            (started by hand, hears Ctrl-C itself)
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What the launcher tells its master by: a signal that nobody else sends, and no terminal sends to all.
ASK_SIGNAL = signal.SIGRTMAX


class Stop:
    """Whether a run has been asked to stop.

    Args:
        seconds: how long it may take to stop in peace, once asked.
        ask: called when it is asked, in a signal handler.

    Attributes:
        is_asked: whether it has been.
    """

    def __init__(self, seconds: float, ask: Callable[[], object] = lambda: None) -> None:
        self.is_asked = False
        self._seconds = seconds
        self._ask = ask
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note the first signal in here, and leave the next to whom it was for; entered by the main thread.

        What is ignored stays so.

        Raises:
            KeyboardInterrupt: it has taken too long since it was asked.
        """
        for number in (*STOP_SIGNALS, ASK_SIGNAL):
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
        if self.is_asked:
            self._previous[signal.Signals(number)](number, frame)
            return
        self.is_asked = True
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        self._ask()

    def _give_up(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(
            f"the step or the checkpoint took longer than {self._seconds:g} s (cluster.rpc_timeout_seconds)"
        )

"""How far a preparation is, and how long it still takes, for somebody who waits."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

_FIRST_SECONDS, _LONGEST_SECONDS = 1.0, 10.0


class Progress:
    """Tells the phase, its rows a second, how much of the whole is done, and the time that is left.

    The time left is that of this phase at its speed so far, and of later ones by what they take beside it, of
    so many processes as they have.
    The speed is that since the first job began: what starts before it does not come again.

    Args:
        phases: in their order, each with its usual share of the time.
        tell: told a line at a time: often at first, then every ten seconds.
        processes: how many a phase has, as things are.
        now: the time in seconds.
    """

    def __init__(
        self,
        phases: Mapping[str, float],
        tell: Callable[[str], None],
        processes: Callable[[str], int] = lambda phase: 1,
        now: Callable[[], float] = lambda: time.monotonic(),
    ) -> None:
        self._shares = MappingProxyType(dict(phases))
        self._tell = tell
        self._processes = processes
        self._now = now
        self._pause = _FIRST_SECONDS
        self._due = now() + self._pause
        self._phase = ""
        self._before = 0.0  # the shares of the phases that are over
        self._later = [*phases]

    def start(self, phase: str, sizes: Sequence[int]) -> None:
        """Begin a phase of jobs of these sizes, bytes or rows; the one before is over."""
        if self._phase:
            self._before += self._shares[self._phase]
        self._phase = phase
        self._later.remove(phase)
        self._sizes = sizes
        self._done = [0.0] * len(sizes)
        self._rows = 0
        self._began = self._now()

    def told(self, job: int, rows: int, share: float) -> None:
        """Hear that a job has done further rows, and which share of it is done: 0 where it begins."""
        if not self._part and not share:
            self._began = self._now()
            return  # nothing can be said yet
        self._rows += rows
        self._done[job] = share
        if self._now() >= self._due:
            self._tell(self.line())
            self._pause = min(2 * self._pause, _LONGEST_SECONDS)
            self._due = self._now() + self._pause

    def line(self) -> str:
        """What there is to say."""
        percent = 100 * min(1.0, self._before + self._shares[self._phase] * self._part)
        speed = ""
        if self._rows:
            speed = f", {self._rows / max(1e-9, self._now() - self._began):,.0f} rows/s"
        return f"{self._phase}: {percent:.0f}%{speed}, left {_minutes(self.seconds_left)}"

    @property
    def _part(self) -> float:
        """How much of the phase is done."""
        done = sum(size * share for size, share in zip(self._sizes, self._done, strict=True))
        return done / max(1, sum(self._sizes))

    @property
    def seconds_left(self) -> float:
        """Of all phases; 0 before anything can be said."""
        if not self._part:
            return 0.0
        phase = (self._now() - self._began) / self._part
        work = (
            phase * self._processes(self._phase) / self._shares[self._phase]
        )  # of one process, for a share of 1
        later = sum(work * self._shares[each] / self._processes(each) for each in self._later)
        return phase * (1 - self._part) + later


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

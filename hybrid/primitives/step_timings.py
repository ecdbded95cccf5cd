"""Where the time of a step goes: seconds by phase in every step, and spans in those that are recorded."""

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Self, TypeAlias

PHASES = ("data", "lookup", "dense", "backward", "update")
STEP = "step"  # the span of a whole step
STEPS_THREAD = "steps"  # the thread that takes steps

Flow: TypeAlias = tuple[int, ...]

_NO_STEP = -1
_NOTHING: AbstractContextManager[None] = nullcontext()
_OFFSET_READINGS = 5


class Span(NamedTuple):
    """Something that took time in a recorded step.

    Attributes:
        name: what it was.
        step: the step that it was part of.
        start_ns, end_ns: wall-clock time.
        thread: the thread that did it; None where it may end in another than it began in.
        cpu_ns: processor time of the thread meanwhile; None where ``thread`` is.
        flow: the same for all spans, on any role, that serve one call; None for most spans.
        num_bytes: that it moved; 0 where nobody counts.
    """

    name: str
    step: int
    start_ns: int
    end_ns: int
    thread: str | None = None
    cpu_ns: int | None = None
    flow: Flow | None = None
    num_bytes: int = 0


class OpenSpan:
    """A span under way. Those of one thread end with their ``with`` block, others by :meth:`close`.

    Attributes:
        num_bytes: see :class:`Span`; may be set until it ends.
    """

    __slots__ = ("_begun", "_spans", "num_bytes")

    def __init__(
        self, spans: list[Span], name: str, step: int, thread: str | None, flow: Flow | None, num_bytes: int
    ) -> None:
        self._spans = spans
        self.num_bytes = num_bytes
        cpu_ns = None if thread is None else time.thread_time_ns()
        start_ns = time.perf_counter_ns()
        self._begun = Span(name, step, start_ns, start_ns, thread, cpu_ns, flow)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, once; in any thread where it was begun by :meth:`StepClock.begin`."""
        end_ns = time.perf_counter_ns()
        begun = self._begun
        cpu_ns = None if begun.cpu_ns is None else time.thread_time_ns() - begun.cpu_ns
        self._spans.append(begun._replace(end_ns=end_ns, cpu_ns=cpu_ns, num_bytes=self.num_bytes))


class StepClock:
    """Adds up the seconds spent in each phase of a step, and records spans of the steps it is told to.

    ======== ================================================================
    data     waiting for the next batch
    lookup   building and sending lookups, and waiting for their answers
    dense    the forward pass of the dense net and the loss
    backward the distributed backward pass, with the all-reduce of DDP
    update   the optimizer of the dense net
    ======== ================================================================

    Phases follow one another in one thread. Spans have any names, lie within each other and within
    phases, and come from any thread; outside a recorded step they cost a comparison.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._recorded = range(0)
        self._spans: list[Span] = []
        self._step = _NO_STEP
        self._step_span: OpenSpan | None = None
        self._thread_names: dict[int, str] = {}

    def record(self, steps: range) -> None:
        """Record the spans of ``steps`` from now on; forget those recorded before."""
        self._recorded = steps
        self._spans = []

    def begin_step(self, step: int) -> None:
        """What follows is part of ``step``; this thread takes it."""
        self._step = step
        if step in self._recorded:
            self._thread_names[threading.get_native_id()] = STEPS_THREAD
            self._step_span = self._open(STEP, step)

    def end_step(self) -> None:
        """The step that has begun is done; what follows is part of none."""
        self._step = _NO_STEP
        if self._step_span is not None:
            self._step_span.close()
            self._step_span = None
            # Steps may be taken by another thread of RPC each time, and this one do other work.
            del self._thread_names[threading.get_native_id()]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of a ``with`` block under ``name``, one of :data:`PHASES`; it is a span, too."""
        start = time.perf_counter()
        try:
            with self.span(name):
                yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def span(
        self, name: str, step: int | None = None, *, flow: Flow | None = None
    ) -> AbstractContextManager[OpenSpan | None]:
        """Record a ``with`` block, which gets None where its step is not recorded.

        Args:
            step: of which it is part; None for the one that has begun on this clock.
            flow: see :class:`Span`.
        """
        of_step = self._step if step is None else step
        return self._open(name, of_step, flow) if of_step in self._recorded else _NOTHING

    def begin(
        self, name: str, step: int | None = None, *, flow: Flow | None = None, num_bytes: int = 0
    ) -> OpenSpan | None:
        """Begin a span that is closed later, by whoever sees its end; None where it is not recorded."""
        of_step = self._step if step is None else step
        if of_step not in self._recorded:
            return None
        return OpenSpan(self._spans, name, of_step, None, flow, num_bytes)

    def take(self) -> dict[str, float]:
        """The seconds since the last call, by phase."""
        seconds, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return seconds

    def take_spans(self) -> list[Span]:
        """The spans that have ended since the last call."""
        spans, self._spans = self._spans, []
        offset_ns = _wall_clock_offset_ns()
        return [s._replace(start_ns=s.start_ns + offset_ns, end_ns=s.end_ns + offset_ns) for s in spans]

    def _open(self, name: str, step: int, flow: Flow | None = None) -> OpenSpan:
        return OpenSpan(self._spans, name, step, self._thread_name(), flow, 0)

    def _thread_name(self) -> str:
        number = threading.get_native_id()
        if number not in self._thread_names:
            # RPC and autograd run threads of their own making, of which Python has no name.
            names = {thread.native_id: thread.name for thread in threading.enumerate()}
            self._thread_names[number] = f"{names.get(number, 'torch')} {number}"
        return self._thread_names[number]


def _wall_clock_offset_ns() -> int:
    """What to add to ``perf_counter_ns`` for the time of day, which processes and machines share.

    The quickest of some readings is taken: between the clocks of a slow one, others have run.
    """
    readings = []
    for _ in range(_OFFSET_READINGS):
        before = time.perf_counter_ns()
        wall = time.time_ns()
        after = time.perf_counter_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]

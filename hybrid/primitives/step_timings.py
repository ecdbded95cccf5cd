"""Timings of a step: seconds by phase in every step, and trace events in recorded steps."""

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
    """An event of a recorded step.

    Attributes:
        name: of the event.
        step: that the event is part of.
        start_ns, end_ns: wall-clock time.
        thread: of the event; None if the event may end in another thread.
        cpu_ns: processor time of the thread during the event; None if ``thread`` is None.
        flow: equal for all events, on any role, that serve one call; None for most events.
        num_bytes: transferred bytes; 0 if they are not counted.
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
    """A span that has not ended. It ends with its ``with`` block, or by :meth:`close`.

    Attributes:
        num_bytes: see :class:`Span`; may be set until the span ends.
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
        """End the span, once; in any thread if :meth:`StepClock.begin` began it."""
        end_ns = time.perf_counter_ns()
        begun = self._begun
        cpu_ns = None if begun.cpu_ns is None else time.thread_time_ns() - begun.cpu_ns
        self._spans.append(begun._replace(end_ns=end_ns, cpu_ns=cpu_ns, num_bytes=self.num_bytes))


class StepClock:
    """Sums the seconds of each phase of a step, and records the spans of selected steps.

    ======== ================================================================
    data     waiting for the next batch
    lookup   building and sending lookups, and waiting for their responses
    dense    the forward pass of the dense net and the loss
    backward the distributed backward pass, with the all-reduce of DDP
    update   the optimizer of the dense net
    ======== ================================================================

    Phases follow one another in one thread. Spans have any names, may be nested, and come from any thread.
    Outside a recorded step, a span costs a comparison.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._recorded = range(0)
        self._spans: list[Span] = []
        self._step = _NO_STEP
        self._step_span: OpenSpan | None = None
        self._thread_names: dict[int, str] = {}

    def record(self, steps: range) -> None:
        """Record the spans of ``steps`` from now on; drop all recorded spans."""
        self._recorded = steps
        self._spans = []

    def begin_step(self, step: int) -> None:
        """Begin ``step``, which this thread takes."""
        self._step = step
        if step in self._recorded:
            self._thread_names[threading.get_native_id()] = STEPS_THREAD
            self._step_span = self._open(STEP, step)

    def end_step(self) -> None:
        """End the step."""
        self._step = _NO_STEP
        if self._step_span is not None:
            self._step_span.close()
            self._step_span = None
            # Another thread of RPC may take the next step, and this thread may do other work.
            del self._thread_names[threading.get_native_id()]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of a ``with`` block under ``name``, one of :data:`PHASES`, and record a span."""
        start = time.perf_counter()
        try:
            with self.span(name):
                yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def span(
        self, name: str, step: int | None = None, *, flow: Flow | None = None
    ) -> AbstractContextManager[OpenSpan | None]:
        """Record a ``with`` block, which receives None if its step is not recorded.

        Args:
            step: of the span; None for the step that this clock has begun.
            flow: see :class:`Span`.
        """
        of_step = self._step if step is None else step
        return self._open(name, of_step, flow) if of_step in self._recorded else _NOTHING

    def begin(
        self, name: str, step: int | None = None, *, flow: Flow | None = None, num_bytes: int = 0
    ) -> OpenSpan | None:
        """Begin a span that any thread may close; return None if its step is not recorded."""
        of_step = self._step if step is None else step
        if of_step not in self._recorded:
            return None
        return OpenSpan(self._spans, name, of_step, None, flow, num_bytes)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, by phase."""
        seconds, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return seconds

    def take_spans(self) -> list[Span]:
        """Return the spans that ended since the last call."""
        spans, self._spans = self._spans, []
        offset_ns = _wall_clock_offset_ns()
        return [s._replace(start_ns=s.start_ns + offset_ns, end_ns=s.end_ns + offset_ns) for s in spans]

    def _open(self, name: str, step: int, flow: Flow | None = None) -> OpenSpan:
        return OpenSpan(self._spans, name, step, self._thread_name(), flow, 0)

    def _thread_name(self) -> str:
        number = threading.get_native_id()
        if number not in self._thread_names:
            # Python has no name for the threads that RPC and autograd create.
            names = {thread.native_id: thread.name for thread in threading.enumerate()}
            self._thread_names[number] = f"{names.get(number, 'torch')} {number}"
        return self._thread_names[number]


def _wall_clock_offset_ns() -> int:
    """Return the difference of the time of day, which machines share, and ``perf_counter_ns``.

    The fastest of several readings counts, since other threads may run during a slow one.
    """
    readings = []
    for _ in range(_OFFSET_READINGS):
        before = time.perf_counter_ns()
        wall = time.time_ns()
        after = time.perf_counter_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]

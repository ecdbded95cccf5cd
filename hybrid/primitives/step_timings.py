"""Timings of training steps: the seconds of each phase, and trace events (spans) of recorded steps."""

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Self

PHASES = ("data", "lookup", "dense", "backward", "update")
STEP = "step"  # the span of a whole step
STEPS_THREAD = "steps"  # the thread that takes steps

_NO_STEP = -1
_NOTHING: AbstractContextManager[None] = nullcontext()


class Span(NamedTuple):
    """A timed event of a recorded step."""

    name: str
    step: int
    start_ns: int  # the time of day
    end_ns: int
    thread: str | None = None  # None if the event may end in a thread other than where it began
    cpu_ns: int | None = None  # processor time of the thread during the event; None without a thread
    num_bytes: int = 0  # transferred bytes; 0 if they are not counted


class OpenSpan:
    """A span that has not ended. A ``with`` block or :meth:`close` ends the span.

    Attributes:
        num_bytes: transferred bytes; may be set until the span ends.
    """

    __slots__ = ("_span", "_spans", "num_bytes")

    def __init__(self, spans: list[Span], name: str, step: int, thread: str | None, num_bytes: int) -> None:
        self._spans = spans
        self.num_bytes = num_bytes
        cpu_ns = None if thread is None else time.thread_time_ns()
        start_ns = time.perf_counter_ns()
        self._span = Span(name, step, start_ns, start_ns, thread, cpu_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the span; call this once. Only a span of :meth:`StepClock.begin` may end in another thread."""
        end_ns = time.perf_counter_ns()
        span = self._span  # cpu_ns has the thread's time at the start
        cpu_ns = None if span.cpu_ns is None else time.thread_time_ns() - span.cpu_ns
        self._spans.append(span._replace(end_ns=end_ns, cpu_ns=cpu_ns, num_bytes=self.num_bytes))


class StepClock:
    """The seconds of each phase, summed until :meth:`take`, and the spans of recorded steps.

    ======== ================================================================
    data     waiting for the next batch
    lookup   building and sending lookups, and waiting for their responses
    dense    the forward pass of the dense net and the loss
    backward the distributed backward pass, with the all-reduce of DDP
    update   the optimizer of the dense net
    ======== ================================================================

    Phases follow one another in one thread. Spans may have any name, be nested, and be in any thread. Outside
    recorded steps, a span costs only a comparison.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._recorded = range(0)
        self._spans: list[Span] = []
        self._step = _NO_STEP
        self._step_span: OpenSpan | None = None
        self._steps_thread_id: int | None = None

    def record(self, steps: range) -> None:
        """Drop all spans; from now on, record the spans of the given steps only."""
        self._recorded = steps
        self._spans = []

    def begin_step(self, step: int) -> None:
        """Begin the training step with the number ``step`` in the calling thread."""
        self._step = step
        if step in self._recorded:
            self._steps_thread_id = threading.get_native_id()
            self._step_span = self._open(STEP, step)

    def end_step(self) -> None:
        self._step = _NO_STEP
        if self._step_span is not None:
            self._step_span.close()
            # Another thread of RPC may take the next step, and this thread may do other work.
            self._step_span = self._steps_thread_id = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of a ``with`` block to phase ``name``; in a recorded step, record a span, too."""
        start = time.perf_counter()
        try:
            with self.span(name):
                yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def span(self, name: str, step: int | None = None) -> AbstractContextManager[OpenSpan | None]:
        """Return a context that records its block as a span; it yields None if the step is not recorded.

        Args:
            step: the step of the span; None for the current step.
        """
        of_step = self._step if step is None else step
        return self._open(name, of_step) if of_step in self._recorded else _NOTHING

    def begin(self, name: str, step: int | None = None, *, num_bytes: int = 0) -> OpenSpan | None:
        """Begin a span that any thread may end; return None if the step is not recorded. See :meth:`span`."""
        of_step = self._step if step is None else step
        if of_step not in self._recorded:
            return None
        return OpenSpan(self._spans, name, of_step, None, num_bytes)

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, and start again from 0."""
        seconds = self.seconds
        self.seconds = dict.fromkeys(PHASES, 0.0)
        return seconds

    def take_spans(self) -> list[Span]:
        """Return the spans that ended since the last call, with start and end in nanoseconds since 1970."""
        spans = self._spans
        self._spans = []
        offset_ns = time.time_ns() - time.perf_counter_ns()  # hosts share the time of day
        return [s._replace(start_ns=s.start_ns + offset_ns, end_ns=s.end_ns + offset_ns) for s in spans]

    def _open(self, name: str, step: int) -> OpenSpan:
        number = threading.get_native_id()
        is_taking_step = number == self._steps_thread_id
        thread = STEPS_THREAD if is_taking_step else f"{threading.current_thread().name} {number}"
        return OpenSpan(self._spans, name, step, thread, 0)

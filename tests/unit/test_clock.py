"""The spans that a clock records: of which step, of which thread, and that there are none otherwise."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybrid.primitives.step_timings import PHASES, STEP, StepClock


def recording(*steps: int) -> StepClock:
    """A clock that records ``steps``, and is in the first of them."""
    clock = StepClock()
    clock.record(range(steps[0], steps[-1] + 1))
    clock.begin_step(steps[0])
    return clock


def in_a_thread(name: str, work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, name=name)
    thread.start()
    join(thread)


def join(thread: threading.Thread) -> None:
    thread.join(10)
    assert not thread.is_alive()


def names(clock: StepClock) -> list[str]:
    """In the order in which they ended."""
    return [span.name for span in clock.take_spans()]


def test_spans_within_each_other_and_within_phases() -> None:
    clock = recording(4)
    before = time.perf_counter()
    with clock.phase("dense"):
        with clock.span("bottom"), clock.span("layer"):
            pass
        with clock.span("head"):
            pass
    longest = time.perf_counter() - before
    clock.end_step()
    layer, bottom, head, dense, step = clock.take_spans()
    assert [s.name for s in (layer, bottom, head, dense, step)] == ["layer", "bottom", "head", "dense", STEP]
    for inner, outer in [(layer, bottom), (bottom, dense), (head, dense), (dense, step)]:
        assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
        assert inner.thread == outer.thread == "steps"
    assert bottom.end_ns <= head.start_ns
    assert {span.step for span in (layer, bottom, head, dense, step)} == {4}
    assert 1e-9 * (dense.end_ns - dense.start_ns) <= clock.take()["dense"] <= longest


def test_spans_are_taken_once() -> None:
    clock = recording(0)
    with clock.span("one"):
        pass
    assert names(clock) == ["one"]
    assert names(clock) == []


def test_only_steps_that_were_asked_for_are_recorded() -> None:
    clock = StepClock()
    clock.record(range(2, 4))
    for step in range(6):
        clock.begin_step(step)
        with clock.phase("data"), clock.span("read"):
            pass
        clock.end_step()
        with clock.span("between steps"):
            pass
    assert [(span.step, span.name) for span in clock.take_spans()] == [
        *((2, "read"), (2, "data"), (2, STEP)),
        *((3, "read"), (3, "data"), (3, STEP)),
    ]


def test_a_clock_that_records_nothing_makes_no_span() -> None:
    clock = StepClock()
    clock.begin_step(0)
    with clock.span("one") as first, clock.span("two", 5) as second, clock.phase("data"):
        assert clock.begin("three") is None
        assert clock.begin("four", 5) is None
    clock.end_step()
    assert (first, second, names(clock)) == (None, None, [])
    assert clock.span("one") is clock.span("two", 5)  # nothing is made for either


def test_recording_anew_forgets_what_was_recorded() -> None:
    clock = recording(0)
    with clock.span("old"):
        pass
    clock.record(range(1))
    assert names(clock) == []


def test_a_span_may_name_its_step() -> None:
    clock = StepClock()
    clock.record(range(3, 5))
    for step in range(6):
        with clock.span("pool", step, flow=(1, step)) as span:
            if span is not None:
                span.num_bytes = 10 * step
    assert [(s.step, s.flow, s.num_bytes) for s in clock.take_spans()] == [(3, (1, 3), 30), (4, (1, 4), 40)]


def test_a_span_may_begin_in_one_thread_and_end_in_another() -> None:
    clock = recording(7)
    span = clock.begin("all-reduce", num_bytes=64)
    assert span is not None
    clock.end_step()
    in_a_thread("callback", span.close)
    ended = {span.name: span for span in clock.take_spans()}
    assert ended["all-reduce"].end_ns >= ended[STEP].end_ns
    assert ended["all-reduce"] == ended["all-reduce"]._replace(step=7, thread=None, cpu_ns=None, num_bytes=64)


def test_every_thread_has_a_name_of_its_own() -> None:
    clock, together = recording(0), threading.Barrier(2)

    def work() -> None:
        with clock.span("work"):
            together.wait(10)  # or the second could have the number of the first

    threads = [threading.Thread(target=work, name="updater") for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    with clock.span("own"):
        pass
    clock.end_step()
    first, second, own, _ = (str(span.thread) for span in clock.take_spans())
    assert first != second
    assert first.startswith("updater ")
    assert second.startswith("updater ")
    assert own == "steps"


def test_the_thread_of_a_step_does_other_work_later() -> None:
    clock = recording(0, 1)
    clock.end_step()

    def step() -> None:
        clock.begin_step(1)
        clock.end_step()

    in_a_thread("another", step)
    with clock.span("late", 1):
        pass
    own, other, late = (span.thread for span in clock.take_spans())
    assert own == other == "steps"
    assert late != "steps"


def test_processor_time_is_that_of_the_thread() -> None:
    clock = recording(0)
    with clock.span("waiting"):
        threading.Event().wait(0.02)
    with clock.span("computing"):
        end_ns = time.thread_time_ns() + 5_000_000
        while time.thread_time_ns() < end_ns:
            pass
    waiting, computing = clock.take_spans()
    assert waiting.cpu_ns is not None
    assert computing.cpu_ns is not None
    assert waiting.end_ns - waiting.start_ns >= 20_000_000
    assert waiting.cpu_ns < 5_000_000 <= computing.cpu_ns


def test_a_slow_reading_of_the_clocks_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = recording(0)
    spans = [100, 200]  # of the span itself, then the clock around each reading of the time of day
    readings = [(1000, 1900), (2000, 2010), (3000, 3800), (4000, 4300), (5000, 5100)]
    counter = iter([*spans, *(ns for reading in readings for ns in reading)])
    day = iter([10_900, 12_005, 13_800, 14_000, 15_000])
    monkeypatch.setattr("hybrid.primitives.step_timings.time.perf_counter_ns", lambda: next(counter))
    monkeypatch.setattr("hybrid.primitives.step_timings.time.time_ns", lambda: next(day))
    with clock.span("one"):
        pass
    (span,) = clock.take_spans()
    assert (span.start_ns, span.end_ns) == (10_100, 10_200)


def test_many_threads_record_at_once() -> None:
    clock = StepClock()
    clock.record(range(1))

    def work() -> None:
        for _ in range(200):
            with clock.span("outer", 0), clock.span("inner", 0):
                pass

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work) for _ in range(4)]:
            done.result(10)
    spans = clock.take_spans()
    assert len(spans) == 4 * 200 * 2
    assert all(span.end_ns >= span.start_ns for span in spans)


class TestClock:
    def test_phases_add_up_and_start_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ticks = iter([0.0, 1.0, 10.0, 12.0, 20.0, 23.0])
        monkeypatch.setattr("hybrid.primitives.step_timings.time.perf_counter", lambda: next(ticks))
        clock = StepClock()
        for name in ("lookup", "dense", "lookup"):
            with clock.phase(name):
                pass
        assert clock.take() == {**dict.fromkeys(PHASES, 0.0), "lookup": 4.0, "dense": 2.0}
        assert clock.take() == dict.fromkeys(PHASES, 0.0)

    def test_time_counts_even_where_the_phase_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ticks = iter([0.0, 1.5])
        monkeypatch.setattr("hybrid.primitives.step_timings.time.perf_counter", lambda: next(ticks))
        clock = StepClock()
        with pytest.raises(ZeroDivisionError), clock.phase("data"):
            _ = 1 / 0
        assert clock.take()["data"] == 1.5

    def test_a_phase_that_does_not_exist_is_a_mistake(self) -> None:
        with pytest.raises(KeyError), StepClock().phase("lunch"):
            pass

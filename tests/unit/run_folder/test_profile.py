"""Timings of a step: the phases and spans that a clock records, and the trace and table of a profile."""

import json
import threading
import time
from pathlib import Path

import pytest
from support.traces import slices

from hybrid.primitives.step_timings import PHASES, STEP, STEPS_THREAD, Span, StepClock
from hybrid.topology import Role, RoleKind
from workers.run_folder.step_profile import Profile

TRAINER = Role(RoleKind.TRAINER, 0)
WORKER = Role(RoleKind.WORKER, 0)
MS = 1_000_000


def recording(*steps: int) -> StepClock:
    """Return a clock that records ``steps``, and is in the first of them."""
    clock = StepClock()
    clock.record(range(steps[0], steps[-1] + 1))
    clock.begin_step(steps[0])
    return clock


def test_nested_spans_and_phases() -> None:
    clock = recording(4)
    before_ns = time.time_ns()
    with clock.phase("dense"):
        with clock.span("bottom"), clock.span("layer"):
            pass
        with clock.span("head"):
            pass
    clock.end_step()
    after_ns = time.time_ns()
    layer, bottom, head, dense, step = clock.take_spans()
    assert [s.name for s in (layer, bottom, head, dense, step)] == ["layer", "bottom", "head", "dense", STEP]
    for inner, outer in [(layer, bottom), (bottom, dense), (head, dense), (dense, step)]:
        assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
        assert inner.thread == outer.thread == STEPS_THREAD
    assert bottom.end_ns <= head.start_ns
    assert {span.step for span in (layer, bottom, head, dense, step)} == {4}
    assert before_ns - MS <= dense.start_ns <= dense.end_ns <= after_ns + MS  # the time of day
    assert 1e-9 * (dense.end_ns - dense.start_ns) <= clock.take()["dense"] <= 1e-9 * (after_ns - before_ns)
    assert clock.take_spans() == []


def test_only_requested_steps_are_recorded() -> None:
    clock = StepClock()
    clock.record(range(2, 4))
    for step in range(6):
        clock.begin_step(step)
        with clock.phase("data"), clock.span("read") as span:
            assert (span is None) == (clock.begin("call") is None) == (step not in (2, 3))
        clock.end_step()
        with clock.span("between steps"), clock.span("pool", step) as span:
            if span is not None:
                span.num_bytes = 10 * step
    assert [(span.step, span.name, span.num_bytes) for span in clock.take_spans()] == [
        *((2, "read", 0), (2, "data", 0), (2, STEP, 0), (2, "pool", 20)),
        *((3, "read", 0), (3, "data", 0), (3, STEP, 0), (3, "pool", 30)),
    ]


def test_a_span_may_end_in_another_thread() -> None:
    clock = recording(7)
    span = clock.begin("all-reduce", num_bytes=64)
    assert span is not None
    clock.end_step()
    (callback := threading.Thread(target=span.close)).start()
    callback.join(10)
    ended = {span.name: span for span in clock.take_spans()}
    assert ended["all-reduce"].end_ns >= ended[STEP].end_ns
    assert ended["all-reduce"] == ended["all-reduce"]._replace(step=7, thread=None, cpu_ns=None, num_bytes=64)


def test_processor_time_is_that_of_the_thread() -> None:
    clock = recording(0)
    with clock.span("waiting"):
        threading.Event().wait(0.02)
    with clock.span("computing"):
        end_ns = time.thread_time_ns() + 5 * MS
        while time.thread_time_ns() < end_ns:
            pass
    waiting, computing = clock.take_spans()
    assert waiting.cpu_ns is not None
    assert computing.cpu_ns is not None
    assert waiting.end_ns - waiting.start_ns >= 20 * MS
    assert waiting.cpu_ns < 5 * MS <= computing.cpu_ns


def test_phases_add_up_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 10.0, 12.0, 20.0, 23.0, 30.0, 31.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    clock = StepClock()
    for name in ("lookup", "dense", "lookup"):
        with clock.phase(name):
            pass
    with pytest.raises(ZeroDivisionError), clock.phase("data"):
        _ = 1 / 0
    assert clock.take() == {**dict.fromkeys(PHASES, 0.0), "lookup": 4.0, "dense": 2.0, "data": 1.5}
    assert clock.take() == dict.fromkeys(PHASES, 0.0)


def span(
    name: str,
    step: int,
    start: float,
    end: float,
    *,
    cpu: float | None = 0,
    thread: str = STEPS_THREAD,
    num_bytes: int = 0,
) -> Span:
    """Return a span between two times in milliseconds; of no thread if its processor time is None."""
    cpu_ns = None if cpu is None else round(cpu * MS)
    span_thread = None if cpu is None else thread
    return Span(name, step, round(start * MS), round(end * MS), span_thread, cpu_ns, num_bytes)


SPANS = {  # step 5 takes 10 ms, step 6 takes 30 ms
    TRAINER: [
        span("ids", 5, 1, 2, cpu=1),
        span("lookup", 5, 1, 4, cpu=2),
        span("lookup", 5, 6, 7, cpu=0.5),
        span("call", 5, 2, 6, cpu=None),
        span("data", 5, 0, 1),
        span(STEP, 5, 0, 10, cpu=5),
        span("data", 6, 20, 23),
        span("ids", 6, 24, 26, cpu=2),
        span("lookup", 6, 24, 27, cpu=2),
        span("all-reduce", 6, 30, 40, cpu=None, num_bytes=4096),
        span("all-reduce", 6, 32, 42, cpu=None, num_bytes=2048),
        span(STEP, 6, 20, 50, cpu=9),
        span("data", 7, 50, 51),
    ],
    WORKER: [
        span("wait", 5, 3, 4, cpu=None),
        span("pool", 5, 4, 5.5, cpu=1, thread="lookup 1"),
        span("pool", 6, 26, 28, cpu=1, thread="lookup 1"),
        span("pool", 6, 26, 28, cpu=1, thread="lookup 2"),
        span("pool", 7, 51, 52, thread="lookup 1"),
    ],
}


def test_the_table_has_means_per_step() -> None:
    profile = Profile(SPANS)
    assert profile.steps == [5, 6]
    assert Profile({TRAINER: [span("data", 0, 0, 1)], WORKER: []}).steps == []
    lines = profile.table().splitlines()
    assert "Mean of steps 5 to 6; a trainer's step takes 20.00 ms." in lines
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    headings = ["span", "calls", "ms", "CPU ms", "% of step", "KiB"]
    assert cells == [
        headings,
        ["step", "1", "20.00", "7.00", "100.0%", ""],
        ["· data", "1", "2.00", "0.00", "10.0%", ""],
        ["· lookup", "1.5", "3.50", "2.25", "17.5%", ""],
        ["· · ids", "1", "1.50", "1.50", "7.5%", ""],
        ["call", "0.5", "2.00", "", "10.0%", ""],
        ["all-reduce", "1", "10.00", "", "50.0%", "3.0"],
        headings,
        ["wait", "0.5", "0.50", "", "2.5%", ""],
        ["pool", "1.5", "2.75", "1.50", "13.7%", ""],
    ]
    assert len({len(line) for line in lines if line.startswith("|")}) == 1 + 1  # one width per table


def test_the_trace_has_the_spans_of_the_steps(tmp_path: Path) -> None:
    Profile(SPANS).write(tmp_path / "new" / "profile")
    assert (tmp_path / "new/profile/table.md").read_text() == Profile(SPANS).table()
    by_role = slices(json.loads((tmp_path / "new/profile/trace.json").read_text()))
    assert sorted(by_role) == ["trainer 0", "worker 0"]
    assert {event["args"]["step"] for events in by_role.values() for event in events} == {5, 6}
    (ids, _) = [event for event in by_role["trainer 0"] if event["name"] == "ids"]
    assert (ids["ts"], ids["dur"], ids["args"]) == (1000, 1000, {"step": 5, "cpu_ms": 1})
    first, second = [event for event in by_role["trainer 0"] if event["name"] == "all-reduce"]
    assert (first["ts"], first["dur"], first["args"]) == (30_000, 10_000, {"step": 6, "bytes": 4096})
    assert first["id"] != second["id"]

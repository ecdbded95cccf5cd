"""What a profile makes of spans: a table whose numbers add up, and a trace that viewers can read."""

import json
from pathlib import Path

import pytest
from support.traces import arrows, slices

from hybrid.primitives.step_timings import STEP, STEPS_THREAD, Flow, Span
from hybrid.topology import Role, RoleKind
from workers.step_profile import Profile, ProfileRow

TRAINER = Role(RoleKind.TRAINER, 0)
OTHER = Role(RoleKind.TRAINER, 1)
WORKER = Role(RoleKind.WORKER, 0)
MS = 1_000_000


def span(
    name: str,
    step: int,
    start: float,
    end: float,
    *,
    cpu: float | None = 0,
    thread: str | None = STEPS_THREAD,
    flow: Flow | None = None,
    num_bytes: int = 0,
) -> Span:
    """A span from and to some millisecond; in no thread where its processor time is None."""
    cpu_ns = None if cpu is None else round(cpu * MS)
    where = None if cpu is None else thread
    return Span(name, step, round(start * MS), round(end * MS), where, cpu_ns, flow, num_bytes)


def two_steps() -> dict[Role, list[Span]]:
    """Of one trainer and one worker: step 5 takes 10 ms, step 6 takes 30 ms."""
    return {
        TRAINER: [
            span("ids", 5, 1, 2, cpu=1),
            span("lookup", 5, 1, 4, cpu=2),
            span("lookup", 5, 6, 7, cpu=0.5),
            span("call", 5, 2, 6, cpu=None, flow=(0, 5)),
            span("data", 5, 0, 1),
            span(STEP, 5, 0, 10, cpu=5),
            span("data", 6, 20, 23),
            span("ids", 6, 24, 26, cpu=2),
            span("lookup", 6, 24, 27, cpu=2),
            span("all-reduce", 6, 30, 40, cpu=None, num_bytes=4096),
            span("all-reduce", 6, 32, 42, cpu=None, num_bytes=2048),
            span("all-reduce", 6, 40, 44, cpu=None),
            span(STEP, 6, 20, 50, cpu=9),
            span("data", 7, 50, 51),
        ],
        WORKER: [
            span("wait", 5, 3, 4, cpu=None, flow=(0, 5)),
            span("pool", 5, 4, 5.5, cpu=1, thread="lookup 1", flow=(0, 5)),
            span("pool", 6, 26, 28, cpu=1, thread="lookup 1"),
            span("pool", 6, 26, 28, cpu=1, thread="lookup 2"),
            span("pool", 7, 51, 52, thread="lookup 1"),
        ],
    }


def row(profile: Profile, role: Role, *path: str) -> ProfileRow:
    (found,) = [row for row in profile.rows(role) if row.path == path]
    return found


def test_the_table_has_means_over_the_steps() -> None:
    profile = Profile(two_steps())
    assert profile.steps == [5, 6]
    assert profile.step_seconds == pytest.approx(0.02)
    step = row(profile, TRAINER, STEP)
    assert (step.count, step.seconds, step.cpu_seconds, step.fraction) == pytest.approx((1, 0.02, 0.007, 1))
    lookup = row(profile, TRAINER, STEP, "lookup")
    assert (lookup.count, lookup.seconds, lookup.cpu_seconds) == pytest.approx((1.5, 0.0035, 0.00225))
    assert lookup.fraction == pytest.approx(0.0035 / 0.02)
    ids = row(profile, TRAINER, STEP, "lookup", "ids")
    assert (ids.count, ids.seconds) == pytest.approx((1, 0.0015))
    pool = row(profile, WORKER, "pool")
    assert (pool.count, pool.seconds, pool.fraction) == pytest.approx((1.5, 0.00275, 0.1375))
    reduced = row(profile, TRAINER, "all-reduce")
    assert (reduced.count, reduced.seconds, reduced.num_bytes) == pytest.approx((1.5, 0.012, 3072))
    assert reduced.cpu_seconds is None


def test_a_spans_own_time_is_that_of_none_within() -> None:
    profile = Profile(two_steps())
    assert row(profile, TRAINER, STEP, "lookup").own_seconds == pytest.approx(0.002)
    assert row(profile, TRAINER, STEP).own_seconds == pytest.approx(0.02 - 0.0035 - 0.002)
    own = sum(row.own_seconds for row in profile.rows(TRAINER) if row.path[0] == STEP)
    assert own == pytest.approx(profile.step_seconds)


def test_rows_are_in_the_order_of_a_step() -> None:
    profile = Profile(two_steps())
    assert [row.path for row in profile.rows(TRAINER)] == [
        (STEP,),
        (STEP, "data"),
        (STEP, "lookup"),
        (STEP, "lookup", "ids"),
        ("call",),
        ("wire",),
        ("all-reduce",),
    ]
    assert [row.path for row in profile.rows(WORKER)] == [("wait",), ("pool",)]


def test_what_is_left_of_a_call_was_on_the_wire() -> None:
    ways = [p.span for p in Profile(two_steps()).placed[TRAINER] if p.path == ("wire",)]
    assert [(way.step, way.start_ns / MS, way.end_ns / MS) for way in ways] == [(5, 2, 3), (5, 5.5, 6)]


@pytest.mark.parametrize("hours", [-1, -1e-6, 1e-6, 1])
def test_clocks_that_disagree_make_no_time_on_the_wire_that_is_not_in_the_call(hours: float) -> None:
    spans = two_steps()
    late_ns = round(hours * 3600e9)
    spans[WORKER] = [
        s._replace(start_ns=s.start_ns + late_ns, end_ns=s.end_ns + late_ns) for s in spans[WORKER]
    ]
    profile = Profile(spans)
    ways = [p.span for p in profile.placed[TRAINER] if p.path == ("wire",)]
    assert all(2 * MS <= way.start_ns <= way.end_ns <= 6 * MS for way in ways)
    slices(profile.trace())


def test_the_largest_spans_of_the_trainers_come_first() -> None:
    spans = two_steps()
    spans[OTHER] = [span("backward", 5, 2, 10), span(STEP, 5, 0, 10), span(STEP, 6, 20, 50)]
    top = Profile(spans).top(2)
    assert [name for name, _ in top] == ["other", "backward"]
    assert dict(top) == pytest.approx({"other": (14.5 + 16) / 40, "backward": 4 / 40})
    assert sum(share for _, share in Profile(spans).top(9)) == pytest.approx(1)


def test_a_trace_that_viewers_can_read() -> None:
    by_role = slices(Profile(two_steps()).trace())
    assert sorted(by_role) == ["trainer 0", "worker 0"]
    assert {event["args"]["step"] for events in by_role.values() for event in events} == {5, 6}
    (ids, _) = [event for event in by_role["trainer 0"] if event["name"] == "ids"]
    assert (ids["ts"], ids["dur"], ids["args"]) == (1000, 1000, {"step": 5, "cpu_ms": 1})
    (first, *_) = [event for event in by_role["trainer 0"] if event["name"] == "all-reduce"]
    assert first["args"] == {"step": 6, "bytes": 4096}


def test_calls_under_way_at_once_have_tracks_of_their_own() -> None:
    placed = Profile(two_steps()).placed[TRAINER]
    tracks = [p.track for p in placed if p.path == ("all-reduce",)]
    assert tracks == ["all-reduce", "all-reduce 2", "all-reduce"]


def test_an_arrow_leads_from_a_call_to_its_worker() -> None:
    trace = Profile(two_steps()).trace()
    ((start, end),) = arrows(trace)
    by_role = slices(trace)
    (call,) = [event for event in by_role["trainer 0"] if event["name"] == "call"]
    (wait,) = [event for event in by_role["worker 0"] if event["name"] == "wait"]
    for tip, event in ((start, call), (end, wait)):
        assert (tip["pid"], tip["tid"], tip["ts"]) == (event["pid"], event["tid"], event["ts"])


def test_a_call_that_no_worker_has_recorded_is_left_as_it_is() -> None:
    spans = {TRAINER: two_steps()[TRAINER], WORKER: []}
    profile = Profile(spans)
    assert arrows(profile.trace()) == []
    assert "wire" not in {p.span.name for p in profile.placed[TRAINER]}
    assert profile.rows(WORKER) == []


def test_both_files_are_written(tmp_path: Path) -> None:
    profile = Profile(two_steps())
    profile.write(tmp_path / "new" / "profile")
    written = json.loads((tmp_path / "new/profile/trace.json").read_text())
    assert written == profile.trace()
    lines = (tmp_path / "new/profile/table.md").read_text().splitlines()
    assert "Mean of steps 5 to 6; a trainer's step takes 20.00 ms." in lines
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert ["· · ids", "1", "1.50", "1.50", "7.5%", ""] in cells
    assert ["all-reduce", "1.5", "12.00", "", "60.0%", "3.0"] in cells
    assert len({len(line) for line in lines if line.startswith("|")}) == 1 + 1  # one width a table


def test_no_step_at_all_is_no_profile() -> None:
    assert Profile({TRAINER: [span("data", 0, 0, 1)], WORKER: []}).steps == []

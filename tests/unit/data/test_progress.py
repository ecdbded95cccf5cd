"""How far a preparation is, and how long it still takes."""

import pytest

from hybrid.config import DataSection
from hybrid.data.parse.column_layout import Layout
from hybrid.data.prepare.file_preparation import phases
from hybrid.data.prepare.preparation_progress import Progress

PHASES = {"reading": 0.6, "writing": 0.4}


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize("slow", [1.0, 7.0])
def test_the_estimate_is_right_where_parts_differ(slow: float) -> None:
    """Parts of all sizes, a second a unit: the time left is right at any moment."""
    clock, lines = Clock(), list[str]()
    progress = Progress(PHASES, lines.append, now=clock)
    sizes = [1, 5, 2, 12]
    for phase, pace in (("reading", slow), ("writing", slow * 2 / 3)):
        progress.start(phase, sizes)
        for job, size in enumerate(sizes):
            for step in range(1, 5):
                clock.seconds += pace * size / 4
                progress.told(job, 100, step / 4)
                total = slow * 20 * (1 + 2 / 3)
                assert progress.seconds_left == pytest.approx(total - clock.seconds, abs=1e-6)
    assert all(line.startswith(("reading: ", "writing: ")) for line in lines)


def test_later_phases_take_longer_where_fewer_processes_are_at_them() -> None:
    """Others help to read, from its middle on, and do not help to write."""
    clock, others = Clock(), 0
    shares = {"reading": 0.6, "counting": 0.1, "writing": 0.3}
    progress = Progress(
        shares, lambda line: None, lambda phase: 2 + (0 if phase == "writing" else others), clock
    )
    progress.start("reading", [1, 1])
    others = 2
    clock.seconds = 30.0
    progress.told(0, 0, 1.0)
    assert progress.seconds_left == pytest.approx(30 + 60 * 0.1 / 0.6 + 2 * 60 * 0.3 / 0.6)
    progress.start("counting", [1])
    progress.start("writing", [1])
    progress.told(0, 0, 0.0)
    clock.seconds += 15.0
    progress.told(0, 0, 0.25)
    assert progress.seconds_left == pytest.approx(45)


@pytest.mark.parametrize(
    ("vocabulary", "ordering", "writing"), [("build", (26, 39.0), (16, 41.0)), ("hash", (0, 0.0), (16, 70.0))]
)
@pytest.mark.parametrize(("start", "slow"), [(0.5, 1.0), (60.0, 4.0)], ids=["idle", "busy"])
def test_the_estimate_is_right_from_a_tenth_of_the_way_on(
    vocabulary: str, ordering: tuple[int, float], writing: tuple[int, float], start: float, slow: float
) -> None:
    """Recorded phases of rows like Criteo's, steps and seconds of each; its processes start slowly."""
    recorded = {
        "reading": (64, 136.0),
        "counting": (16, 19.0),
        "ordering values": ordering,
        "writing": writing,
    }
    clock = Clock()
    layout = Layout.of(DataSection(format="criteo", vocabulary=vocabulary))
    shares = phases(layout.sparse)
    assert sum(shares.values()) == pytest.approx(1)
    progress = Progress(shares, lambda line: None, now=clock)
    whole = start + slow * sum(seconds for _, seconds in recorded.values())
    for phase, (steps, seconds) in recorded.items():
        progress.start(phase, [1] * steps)
        if phase == "reading":
            clock.seconds += start
            progress.told(0, 0, 0.0)
            progress.told(1, 0, 0.0)
        for step in range(0, steps, 2):
            clock.seconds += slow * 2 * seconds / steps
            for job in (step, step + 1):
                progress.told(job, 0, 1.0)
            left = whole - clock.seconds
            if clock.seconds - start > 0.1 * whole:
                assert progress.seconds_left == pytest.approx(left, rel=0.25, abs=0.02 * whole)


def test_a_line_says_phase_share_speed_and_time() -> None:
    clock, lines = Clock(), list[str]()
    progress = Progress(PHASES, lines.append, now=clock)
    progress.start("reading", [3, 1])
    clock.seconds = 120
    progress.told(0, 60_000, 0.5)
    progress.told(0, 60_000, 0.75)  # too soon for another line
    assert lines == ["reading: 22%, 500 rows/s, left 6:53"]
    clock.seconds = 200
    progress.told(1, 0, 1.0)
    progress.start("writing", [1])
    clock.seconds = 9000
    progress.told(0, 0, 0.5)
    assert lines[2] == "writing: 80%, left 2:26:40"

"""How far a preparation is, and how long it still takes."""

import pytest

from hybrid.data.progress import Progress

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
    progress = Progress(PHASES, lines.append, clock)
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


def test_a_line_says_phase_share_speed_and_time() -> None:
    clock, lines = Clock(), list[str]()
    progress = Progress(PHASES, lines.append, clock)
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

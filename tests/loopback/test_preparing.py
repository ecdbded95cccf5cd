"""Jobs of a preparation go to a host and back as signed calls; the host is this process."""

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.commands import eventually
from support.samples import csv_config, write

from hybrid.data.parse.segments import parts_of
from hybrid.data.prepare.holdout import Split
from hybrid.data.prepare.other_hosts import LookJob, look
from hybrid.data.prepare.process_pool import Event, Told
from hybrid.data.prepare.stages import ParseJob, Piece, Reading, learn_piece, parse_part
from hybrid.topology import MASTER
from workers.controller.preparing import HelpingHost

pytestmark = pytest.mark.usefixtures("loopback")

SECONDS = 30.0
ROWS = "label,x,user\n" + "".join(f"{i % 2},{i},u{i % 7}\n" for i in range(99)) + "0,much,b\n"
TELL_NOBODY: Told = lambda rows, share: None  # noqa: E731


def heard(host: HelpingHost, count: int) -> dict[int, Event]:
    """What some jobs come to, by number."""
    found: dict[int, Event] = {}

    def has_heard() -> bool:
        found.update({each.number: each for each in host.hear() if each.kind != "told"})
        return len(found) == count

    assert eventually(has_heard, SECONDS)
    return found


@pytest.fixture
def jobs(tmp_path: Path) -> list[ParseJob]:
    """The same part, to parse twice."""
    config = csv_config(write(tmp_path / "a.csv", ROWS), dense=("x",), sparse=("user",))
    reading = Reading(config.data, {}, {})
    (part,) = parts_of([tmp_path / "a.csv"], reading.layout)
    return [ParseJob(part, reading, tmp_path / "parts" / name) for name in ("there", "here")]


def learnt(job: ParseJob) -> tuple[Piece, Reading]:
    return Piece(job.folder / "piece-0", 0, Split("random", 1, 0.5)), job.reading


def test_what_comes_back_is_what_is_made_here(jobs: list[ParseJob], tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    there, here = jobs
    host = HelpingHost("elsewhere", MASTER)
    host.give(-1, look, LookJob((), write(tmp_path / "probe", "token"), "token", 1))
    host.give(3, parse_part, there)
    found = heard(host, 2)
    assert found[-1].content > 0
    assert found[3].content == parse_part(here, TELL_NOBODY)
    host.give(4, learn_piece, learnt(there))
    by_field(heard(host, 1)[4].content, learn_piece(learnt(here), TELL_NOBODY))
    host.close()
    assert set(psutil.Process().children()) == before


def by_field(found: Any, expected: Any) -> None:
    """See that two values are the same, arrays in them too."""
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict):
        by_field([*found.items()], [*expected.items()])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for each, other in zip(found, expected, strict=True):
            by_field(each, other)
    else:
        assert found == expected


def test_a_job_that_fails_there_says_why_and_leaves_no_process(jobs: list[ParseJob]) -> None:
    before = set(psutil.Process().children())
    host = HelpingHost("elsewhere", MASTER)
    Path(str(jobs[0].part.path)).unlink()
    host.give(0, parse_part, jobs[0])
    (event,) = heard(host, 1).values()
    assert event.kind == "failed"
    assert f"{jobs[0].part.path}: " in event.content
    assert set(psutil.Process().children()) == before
    host.close()

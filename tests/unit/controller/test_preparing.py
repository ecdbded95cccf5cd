"""What a trainer's host does for a preparation, and that all of its data may travel."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.samples import csv_config, write

from hybrid.config import ColumnSection
from hybrid.data.parse.segments import parts_of
from hybrid.data.prepare.holdout import Split
from hybrid.data.prepare.process_pool import Event
from hybrid.data.prepare.stages import ParseJob, Piece, Reading, learn_piece, parse_part
from hybrid.data.prepare.vocabulary_order import RankJob
from hybrid.security import signed_pickler
from hybrid.security.allow_list import Allowed, Unpickler
from hybrid.storage.remote_path import RemotePath, place
from hybrid.transport.rpc import payload_classes
from workers.controller.deployment import CREATED, DATA
from workers.controller.preparing import STAGES, Preparer

ALLOWED = Allowed((*payload_classes.DATA, *DATA), CREATED)
ROWS = "label,x,user\n1,2,a\n0,much,b\n0,4,b\n"


def travelled(value: Any) -> Any:
    return Unpickler(*signed_pickler._dump(value), ALLOWED).load()


def text(value: Any) -> str:
    return repr(value)


@pytest.fixture
def job(tmp_path: Path) -> ParseJob:
    """A part of a file, whose second row is bad."""
    path = write(tmp_path / "a.csv", ROWS)
    config = csv_config(path, dense=("x",), sparse=("user", "step"))
    columns = {"step": ColumnSection(kind="buckets", source=("x",), quantiles=2)}
    reading = Reading(config.data, columns, {})
    (part,) = parts_of([path], reading.layout)
    (tmp_path / "parts").mkdir()
    return ParseJob(part, reading, tmp_path / "parts" / "train-0")


def test_what_stages_take_and_give_travels(job: ParseJob) -> None:
    def tell(rows: int, share: float) -> None:
        pass

    log = parse_part(job, tell)
    piece = Piece(job.folder / "piece-0", 0, Split("random", 1, 0.5))
    learnt = learn_piece((piece, job.reading), tell)
    assert len(log.blocks[0].bad) == 1
    assert learnt.numbers[0][1].size
    rank = RankJob({0: job.reading.layout.sparse[0]}, [piece.folder], job.folder / "words", 1)
    store = place("s3://bucket/a.csv")
    assert isinstance(store, RemotePath)
    far = job._replace(part=dataclasses.replace(job.part, path=store), sent=store)
    for value in (job, far, log, (piece, job.reading), learnt, rank, Event("done", 3, log)):
        assert text(travelled(value)) == text(value)


@pytest.fixture
def preparer(tmp_path: Path) -> Iterator[Preparer]:
    preparer = Preparer(tmp_path)
    yield preparer
    preparer.close()


def answers(preparer: Preparer, jobs: list[tuple[int, str, Any]]) -> list[Event]:
    """What becomes of the jobs, however many calls it takes."""
    found = preparer.exchange(jobs, 1.0)
    while not any(each.kind != "told" for each in found):
        found += preparer.exchange([], 1.0)
    return [each for each in found if each.kind != "told"]


def test_jobs_are_done_by_processes_of_the_host(job: ParseJob, preparer: Preparer) -> None:
    (event,) = answers(preparer, [(5, parse_part.__name__, job)])
    assert (event.kind, event.number, event.content.num_rows) == ("done", 5, 3)
    assert (job.folder / "piece-0").is_dir()


def test_paths_start_at_the_masters_folder(job: ParseJob, preparer: Preparer, tmp_path: Path) -> None:
    part = dataclasses.replace(job.part, path=Path("a.csv"))
    relative = job._replace(part=part, folder=Path("parts/train-1"))
    (event,) = answers(preparer, [(0, parse_part.__name__, relative)])
    assert event.kind == "done"
    assert (tmp_path / "parts" / "train-1").is_dir()


def test_a_failure_is_a_text_and_ends_all(job: ParseJob, preparer: Preparer) -> None:
    Path(job.part.path).unlink()
    (event,) = answers(preparer, [(2, parse_part.__name__, job)])
    assert (event.kind, event.number) == ("failed", 2)
    assert str(job.part.path) in event.content
    assert not preparer._pool._idle


def test_no_stage_writes_arrays_that_hosts_would_share() -> None:
    assert [*STAGES] == ["look", "parse_part", "send_part", "learn_piece", "rank_words"]

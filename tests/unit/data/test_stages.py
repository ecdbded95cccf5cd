"""A part of a file is there whole or not at all, whoever else is at it."""

from pathlib import Path

import pytest
from support.samples import csv_config, write

from hybrid.data.from_files import FilesPreparation
from hybrid.data.parts import parts_of
from hybrid.data.stages import MAKING, ParseJob, Reading, parse_part


@pytest.fixture
def job(tmp_path: Path) -> ParseJob:
    config = csv_config(write(tmp_path / "a.csv", "label,x,user\n1,2,a\n0,4,b\n"), sparse=("user",))
    reading = Reading(config.data, {}, {})
    (part,) = parts_of([tmp_path / "a.csv"], reading.layout)
    return ParseJob(part, reading, tmp_path / "parts" / "train-0")


def test_who_is_slower_leaves_what_is_there(job: ParseJob) -> None:
    def parsed_elsewhere(rows: int, share: float) -> None:
        if not share:  # it begins
            return
        assert [each.name[: len(MAKING)] for each in job.folder.parent.iterdir()] == [MAKING]
        parse_part(job, lambda rows, share: None)
        (job.folder / "theirs").touch()

    assert parse_part(job, parsed_elsewhere).num_rows == 2
    assert (job.folder / "theirs").exists()
    assert [*job.folder.parent.iterdir()] == [job.folder]


def test_what_a_killed_process_was_at_is_removed(job: ParseJob, tmp_path: Path) -> None:
    spilt, data = job.folder.parent, job.reading.data
    (spilt / f"{MAKING}train-7-of-another").mkdir(parents=True)
    config = csv_config(job.part.path, dense=data.dense, sparse=data.sparse)
    preparation = FilesPreparation(
        config, job.reading, tmp_path / "new", spilt, lambda line: None, lambda: None, 1 << 30
    )
    preparation.write([job.part.path], [])
    assert not [*spilt.glob(f"{MAKING}*")]

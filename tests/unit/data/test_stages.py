"""A part of a file is there whole or not at all, whoever else is at it."""

from pathlib import Path
from typing import Any

import pytest
from support.samples import csv_config, write
from support.stores import BUCKET, Store

from hybrid.data.parse.segments import parts_of
from hybrid.data.prepare import spill, stages
from hybrid.data.prepare.file_preparation import FilesPreparation
from hybrid.data.prepare.stages import MAKING, ParseJob, Reading, parse_part, send_part
from hybrid.storage import files as storage
from hybrid.storage.remote_path import Place, RemotePath, place


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


@pytest.fixture
def sent(job: ParseJob, store: Store, tmp_path: Path) -> RemotePath:
    """Where in a store another host sends the part."""
    found = place(f"s3://{BUCKET}/{tmp_path.name}/train-0")
    assert isinstance(found, RemotePath)
    return found


def content(folder: Place) -> dict[str, bytes]:
    """The files of a folder."""
    start = len(str(folder)) + 1
    return {
        str(each.place)[start:]: storage.read_bytes(each.place)
        for each in storage.entries(folder, is_deep=True)
    }


def never(*given: Any) -> None:
    raise AssertionError(given)


def test_what_is_sent_is_what_is_made_here_and_is_not_parsed_again(
    job: ParseJob, sent: RemotePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, told = parse_part(job, lambda rows, share: None), list[tuple[int, float]]()
    send_part(job._replace(sent=sent), lambda *given: told.append(given))
    assert content(sent) == content(job.folder)
    assert told == [(0, 0.0), (2, 1.0)]
    monkeypatch.setattr(stages, "_parse", never)
    send_part(job._replace(sent=sent), lambda *given: told.append(given))
    there = job._replace(folder=tmp_path / "another" / "train-0", sent=sent)
    assert parse_part(there, lambda *given: told.append(given)) == log
    assert content(there.folder) == content(job.folder)
    assert told[2:] == [(0, 1.0), (0, 1.0)]


@pytest.mark.parametrize("gone", ["part.json", "piece-0/words.arrow"])
def test_what_is_not_all_there_is_parsed(job: ParseJob, sent: RemotePath, gone: str, tmp_path: Path) -> None:
    """Whoever sent it was killed, or somebody else removes it at this moment."""
    there = job._replace(folder=tmp_path / "another" / "train-0", sent=sent)
    send_part(there, lambda rows, share: None)
    storage.remove(sent / gone)
    assert parse_part(there, lambda rows, share: None) == parse_part(job, lambda rows, share: None)
    assert content(there.folder) == content(job.folder)
    assert spill.is_sent(sent) == (gone != "part.json")

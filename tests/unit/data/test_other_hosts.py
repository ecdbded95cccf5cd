"""What a host must see that takes part in a preparation."""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.samples import write

from hybrid.data.parse.input_files import InputFile
from hybrid.data.prepare import memory_limit
from hybrid.data.prepare.other_hosts import LookJob, look
from hybrid.errors import DataError

TELL_NOBODY: Callable[[int, float], None] = lambda rows, share: None  # noqa: E731


@pytest.fixture
def job(tmp_path: Path) -> LookJob:
    file = InputFile.of(write(tmp_path / "a.csv", "x\n1\n"), is_whole=True)
    return LookJob((file,), write(tmp_path / "probe", "token"), "token", 1 << 20)


def test_who_sees_the_same_says_how_many_cores_it_has(job: LookJob) -> None:
    elsewhere = dataclasses.replace(job.files[0], real_path="/mounted/elsewhere")
    assert look(job._replace(files=(elsewhere,)), TELL_NOBODY) == len(os.sched_getaffinity(0))


def test_it_has_fewer_processes_than_cores_where_memory_is_short(
    job: LookJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit, "available_memory_bytes", lambda: 2 << 20)
    assert look(job, TELL_NOBODY) == 1
    with pytest.raises(DataError, match="half of its free memory is less than the 1,048,577 bytes"):
        look(job._replace(process_bytes=(1 << 20) + 1), TELL_NOBODY)


def test_a_file_of_another_content_or_time_is_another(job: LookJob) -> None:
    path = Path(job.files[0].path)
    shutil.copy(path, path.with_suffix(".copy"))
    os.utime(path.with_suffix(".copy"), ns=(0, 0))
    write(path.with_suffix(".other"), "x\n2\n")
    os.utime(path.with_suffix(".other"), ns=(job.files[0].modified_ns,) * 2)
    for suffix in (".copy", ".other"):
        other = path.with_suffix(suffix)
        expected = dataclasses.replace(job.files[0], path=str(other))
        with pytest.raises(DataError, match=f"{other} on host .* is another file"):
            look(job._replace(files=(expected,)), TELL_NOBODY)


def test_a_file_that_is_not_there_is_named(job: LookJob) -> None:
    Path(job.files[0].path).unlink()
    with pytest.raises(DataError, match=rf"{job.files[0].path}: cannot be read"):
        look(job, TELL_NOBODY)


def test_a_folder_that_is_not_shared_is_named(job: LookJob, tmp_path: Path) -> None:
    for probe, token in ((job.probe, "another"), (tmp_path / "nothing", "token")):
        with pytest.raises(DataError, match=rf"{tmp_path} on host .* data\.cache_folder must be storage"):
            look(job._replace(probe=probe, token=token), TELL_NOBODY)

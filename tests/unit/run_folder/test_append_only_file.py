"""Records on a full disk are appended atomically."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from workers.run_folder.append_only_file import AppendOnlyFile


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free bytes of a disk, which writes as many bytes as are free."""
    left = [1 << 20]
    write = os.write

    def limited(descriptor: int, content: memoryview) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, content[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", limited)
    return left


def opened(path: Path, make_room: Callable[[], bool]) -> AppendOnlyFile:
    file = AppendOnlyFile(path, make_room)
    file.write(b"first\n")
    return file


@pytest.mark.parametrize("left", [0, 3])
def test_a_record_that_does_not_fit_leaves_nothing(tmp_path: Path, room: list[int], left: int) -> None:
    file = opened(tmp_path / "f", lambda: False)
    room[0] = left
    with pytest.raises(OSError, match="No space left on device"):
        file.write(b"second\n")
    room[0] = 100
    file.write(b"third\n")
    file.close()
    assert (tmp_path / "f").read_text() == "first\nthird\n"


def test_a_record_is_written_once_there_is_room(tmp_path: Path, room: list[int]) -> None:
    def make_room() -> bool:
        room[0] = 100
        return True

    file = opened(tmp_path / "f", make_room)
    room[0] = 3
    file.write(b"second\n")
    file.sync()
    file.close()
    assert (tmp_path / "f").read_text() == "first\nsecond\n"

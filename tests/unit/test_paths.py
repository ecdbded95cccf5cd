"""Files that cannot be written are said in one line, with what to do."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from hybrid.errors import HybridError
from workers.run_folder.curves import matplotlib_leaving_no_files
from workers.run_folder.paths import scratch_logs


@pytest.mark.parametrize("using", [lambda: scratch_logs("hybrid-run-"), matplotlib_leaving_no_files])
def test_a_temporary_folder_that_takes_no_files(
    using: Callable[[], AbstractContextManager[object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MPLCONFIGDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    rule = "cannot be written: No such file or directory; make room there, or set TMPDIR to another place"
    with pytest.raises(HybridError, match=f"^{tmp_path / 'none'}: {rule}$"), using():
        pytest.fail("there is no such folder")

"""A checkpoint that tests open, and alter."""

from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a whole checkpoint, after step 1."""
    return write_checkpoint(tmp_path / "step-1")

"""The names of ``import hybrid``: cheap to import, listed by dir and help, typed."""

import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import hybrid


def test_import_does_not_import_torch() -> None:
    code = "import sys, hybrid; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_all_names_are_listed_and_documented() -> None:
    text = pydoc.plain(pydoc.render_doc(hybrid))
    for name in hybrid.__all__:
        assert name in dir(hybrid)
        assert getattr(hybrid, name).__doc__
        assert name in text
    assert {"connect", "load", "Embedding", "EmbeddingBag", "Adam"} <= set(hybrid.__all__)


@pytest.mark.long
def test_type_checkers_see_the_names(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import hybrid\nreveal_type(hybrid.connect())\nreveal_type(hybrid.Embedding(3, 4))\nhybrid.Embeding\n"
    )
    options = ["--follow-imports=silent", "--cache-dir", str(tmp_path), str(script)]
    mypy = [sys.executable, "-m", "mypy", *options]
    checked = subprocess.run(
        mypy, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=110
    ).stdout
    assert "hybrid.custom_loop.cluster.Cluster" in checked
    assert "hybrid.custom_loop.embedding_modules.Embedding" in checked
    assert 'has no attribute "Embeding"' in checked

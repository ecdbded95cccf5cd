"""The names of ``import hybrid``: cheap to import, listed by dir and help, typed."""

import ast
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import hybrid


def test_import_does_not_import_torch() -> None:
    code = "import sys, hybrid; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.long
def test_commands_of_trained_models_import_nothing_of_training() -> None:
    """They also build nets."""
    code = (
        "import sys, torch, workers.cli.model_commands\n"
        "from hybrid.models import dlrm, hstu, self_attention\n"
        "with torch.device('meta'): dlrm.DLRM(2, 2, 4), hstu.HSTU(4, 3), self_attention.SelfAttention(4, 3)\n"
        "assert not {'numba', 'sympy', 'torch._dynamo'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_all_names_are_listed_and_documented() -> None:
    text = pydoc.plain(pydoc.render_doc(hybrid))
    for name in hybrid.__all__:
        assert name in dir(hybrid)
        assert getattr(hybrid, name).__doc__
        assert name in text
    assert {"connect", "load", "Embedding", "EmbeddingBag", "Adam"} <= set(hybrid.__all__)


def test_documentation_finds_the_names_without_an_import() -> None:
    """mkdocstrings parses the source; names that are computed would be missing on the page."""
    tree = ast.parse(Path(hybrid.__file__).read_text(encoding="utf-8"))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert names == hybrid.__all__

"""The names of ``import hybrid``: cheap to import, listed by dir and help, typed."""

import pydoc
import subprocess
import sys

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

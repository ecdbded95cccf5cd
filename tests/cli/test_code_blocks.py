"""The code blocks of README and docs: configurations load, and what Python imports is there.

Tests of each page run them; this one sees that none is forgotten when a name changes.
"""

import ast
import importlib
import re
from pathlib import Path

import pytest
from support.commands import ROOT

import hybrid
from hybrid.config.loading import load_config

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OWN = ("hybrid", "workers")


def blocks(language: str) -> dict[str, str]:
    """Those of one language, by page and number."""
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return {
        f"{page.name}-{i}": block for page in PAGES for i, block in enumerate(fence.findall(page.read_text()))
    }


TOML, PYTHON = blocks("toml"), blocks("python")


@pytest.mark.parametrize("block", list(TOML.values()), ids=TOML)
def test_a_configuration_loads(block: str, tmp_path: Path) -> None:
    file = tmp_path / "page.toml"
    file.write_text(block)
    load_config(file)


@pytest.mark.parametrize("block", list(PYTHON.values()), ids=PYTHON)
def test_what_python_takes_of_this_project_is_there(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        match node:
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in OWN:
                there = dir(importlib.import_module(module))
                assert [name.name for name in node.names if name.name not in there] == []
            case ast.Attribute(value=ast.Name(id="hybrid"), attr=name):
                assert hasattr(hybrid, name)

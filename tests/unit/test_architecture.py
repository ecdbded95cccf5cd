"""The architecture: which package imports which, unique module names, and no references to missing files."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_imports_keep_the_contracts_of_pyproject() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_module_names_are_unique() -> None:
    modules = [file.stem for top in ("hybrid", "workers") for file in (ROOT / top).rglob("*.py")]
    repeated = {name for name, count in Counter(modules).items() if count > 1 and not name.startswith("__")}
    assert not repeated


def test_class_names_are_unique() -> None:
    names = Counter(
        node.name
        for top in ("hybrid", "workers")
        for file in (ROOT / top).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert not {name for name, count in names.items() if count > 1}


def test_files_that_text_refers_to_exist() -> None:
    """In pages and in code, such as ``hybrid/batch.py``; paths in docs/upstream.md are those of torch."""
    pages = {ROOT / "README.md", *(ROOT / "docs").glob("*.md")} - {ROOT / "docs/upstream.md"}
    tops = [ROOT / name for name in ("hybrid", "workers", "tests", "scripts")]
    for file in [*pages, *(file for top in tops for file in top.rglob("*.py"))]:
        for name in re.findall(r"`((?:\w+/)+\w+\.py)`", file.read_text(encoding="utf-8")):
            assert any((folder / name).is_file() for folder in (ROOT, *tops)), f"{name} in {file}"


def test_tests_on_the_upstream_page_exist() -> None:
    """Each section links test files; each test that its table names is in one of these files."""
    page = (ROOT / "docs/upstream.md").read_text(encoding="utf-8")
    num_names = 0
    for section in page.split("\n## ")[1:]:
        paths = re.findall(r"\]\(\.\./(tests/[\w/]+\.py)\)", section)
        code = "\n".join((ROOT / path).read_text(encoding="utf-8") for path in paths)
        files = {Path(path).name for path in paths}
        names = [
            name
            for line in section.splitlines()
            if line.startswith("| `")
            for name in re.findall(r"`([\w.]+)`", line.split(" | ")[1])
        ]
        missing = [n for n in names if n not in files and not re.search(rf"(def|class) {n}\b", code)]
        assert missing == []
        num_names += len(names)
    assert num_names > 100

"""Every file has its room: who may import whom, what a room says of itself, and where its tests are."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path for top in ("hybrid", "workers") for path in (ROOT / top).rglob("__init__.py"))


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """What import-linter says of the packages in ``folder``, by the contracts in pyproject.toml."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_imports_go_down() -> None:
    ended = lint_imports(ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("file", "planted", "rooms"),
    [
        ("hybrid/steps/ticket.py", "hybrid.embedding.spec", ("hybrid.steps", "hybrid.embedding")),
        ("hybrid/embedding/spec.py", "hybrid.dense.configured", ("hybrid.embedding", "hybrid.dense")),
        ("workers/session/job.py", "workers.roles.master", ("workers.session", "workers.roles")),
        ("hybrid/memory.py", "workers.task", ("hybrid", "workers")),
    ],
)
def test_an_import_that_goes_up_is_found(
    tmp_path: Path, file: str, planted: str, rooms: tuple[str, str]
) -> None:
    for name in ("hybrid", "workers"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / file).open("a") as opened:
        opened.write(f"\nimport {planted}\n")
    ended = lint_imports(tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert " is not allowed to import ".join(rooms) in ended.stdout


def test_the_design_has_the_same_rooms() -> None:
    """The tables of docs/design.md, from the bottom up, a line a layer."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    design = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    for contract in contracts:
        if contract["type"] == "layers":
            (container,) = contract["containers"]
            layers = [layer.split(" | ") for layer in reversed(contract["layers"])]
            table = design.partition(f"| rooms of {container},")[2].partition("\n\n")[0].splitlines()[2:]
            assert [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table] == layers


@pytest.mark.parametrize("file", PACKAGES, ids=lambda file: str(file.parent.relative_to(ROOT)))
def test_a_room_says_where_to_begin_reading(file: Path) -> None:
    said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert said is not None
    (first,) = re.findall(r"Begin\s+with\s+``(\w+)``", said)
    assert any((file.parent / name).exists() for name in (first, f"{first}.py")), first


def test_a_unit_test_lies_where_its_file_lies() -> None:
    """tests/unit/ROOM/test_FILE.py, or test_FILE_ASPECT.py, is of ROOM/FILE.py, in whichever package."""
    tops = [ROOT / name for name in ("hybrid", "workers", "scripts", "tests")]
    for test in (ROOT / "tests/unit").rglob("test_*.py"):
        room = test.parent.relative_to(ROOT / "tests/unit")
        files = [file.stem for top in tops for file in (top / room).glob("*.py")]
        name = test.stem.removeprefix("test_")
        is_of_one = any(name == file or name.startswith(f"{file}_") for file in files)
        assert is_of_one or test == Path(__file__), test.relative_to(ROOT)


def test_every_file_that_is_named_is_there() -> None:
    """In pages and in the code; such as ``hybrid/batch.py``, or ``data/order.py`` of the same package."""
    pages = {ROOT / "README.md", *(ROOT / "docs").glob("*.md")} - {
        ROOT / "docs/upstream.md"
    }  # of torch's files
    tops = [ROOT / name for name in ("hybrid", "workers", "tests", "scripts")]
    for file in [*pages, *(file for top in tops for file in top.rglob("*.py"))]:
        for name in re.findall(r"`((?:\w+/)+\w+\.py)`", file.read_text(encoding="utf-8")):
            assert any((place / name).is_file() for place in (ROOT, *tops)), f"{name} in {file}"

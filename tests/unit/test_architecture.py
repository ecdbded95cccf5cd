"""The architecture: which package imports which, unique module names, and no references to missing files."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [file for top in ("hybrid", "workers") for file in (ROOT / top).rglob("*.py")]


@pytest.fixture(scope="module")
def nodes() -> list[tuple[Path, ast.AST]]:
    """The classes and calls of all modules, with the module's file."""
    return [
        (file, node)
        for file in MODULES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef | ast.Call)
    ]


def test_module_names_are_unique() -> None:
    names = Counter(file.stem for file in MODULES)
    assert not {name for name, count in names.items() if count > 1 and not name.startswith("__")}


def test_class_names_are_unique(nodes: list[tuple[Path, ast.AST]]) -> None:
    names = Counter(node.name for _, node in nodes if isinstance(node, ast.ClassDef))
    assert not {name for name, count in names.items() if count > 1}


# The modules that open files without hybrid.storage, and why nobody else's link or FIFO can be there.
OPENERS = {
    # descriptors that local_copy has opened, or what open_parquet yields
    *("hybrid/checkpoint/tensor_file.py", "hybrid/embedding/stored_matrix.py"),
    *("hybrid/data/parse/parquet_blocks.py", "hybrid/data/parse/sources.py"),
    "hybrid/embedding/saved_tables.py",
    # a folder without links, see build_directory
    *("hybrid/data/encode/vocabulary_file.py", "hybrid/data/prepare/file_preparation.py"),
    "hybrid/data/dataset/prepared_dataset.py",
    # a file that the user names, the user's private folder, standard output
    *("hybrid/config/loading.py", "hybrid/security/secret.py", "hybrid/user_code/run_signature.py"),
    "workers/cli/model_commands.py",
    "workers/run_folder/run_report.py",  # a file of its package
    # /proc, /sys or memory
    *("hybrid/dense/matmul.py", "hybrid/primitives/available_memory.py"),
    *("hybrid/security/closed_listeners.py", "hybrid/shared_memory/shared_slots.py"),
    *("workers/launching/fork_server.py", "workers/launching/role_processes.py"),
    "workers/console.py",
}
OPENING = re.compile(
    r"(?<!\w)(open|os\.(open|fdopen)|np\.(load|save|memmap|fromfile)|safe_open|load_file|(\w+\.)*open_memmap)"
    r"|pq\.(ParquetFile|ParquetWriter|read_\w+)|.*\.(write_text|write_bytes|read_text|read_bytes)"
)


def opens_a_file(call: ast.Call) -> bool:
    """Whether a call opens a file otherwise than by hybrid.storage."""
    name = ast.unparse(call.func)
    if name.partition(".")[0] in ("files", "storage") or any(each.arg == "opener" for each in call.keywords):
        return False
    is_method = name.endswith(".open") and bool(call.args) and isinstance(call.args[0], ast.Constant)
    return is_method or OPENING.fullmatch(name) is not None


def test_files_are_opened_by_the_storage_package(nodes: list[tuple[Path, ast.AST]]) -> None:
    """So no module follows a link, or waits for a FIFO, in a folder that another user has sent."""
    found = {
        str(file.relative_to(ROOT))
        for file, node in nodes
        if isinstance(node, ast.Call) and opens_a_file(node) and file.parent.name != "storage"
    }
    assert found == OPENERS


def test_files_that_text_refers_to_exist() -> None:
    """In pages and in code, such as ``hybrid/batch.py``."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    tops = [ROOT / name for name in ("hybrid", "workers", "tests", "scripts")]
    for file in [*pages, *(file for top in tops for file in top.rglob("*.py"))]:
        for name in re.findall(r"`((?:\w+/)+\w+\.py)`", file.read_text(encoding="utf-8")):
            assert any((folder / name).is_file() for folder in (ROOT, *tops)), f"{name} in {file}"


def test_tests_on_the_upstream_page_exist() -> None:
    """Each section links test files; each test that its table names is in one of these files."""
    page = (ROOT / "tests/UPSTREAM.md").read_text(encoding="utf-8")
    num_names = 0
    for section in page.split("\n## ")[1:]:
        paths = re.findall(r"\]\(([\w/]+\.py)\)", section)
        code = "\n".join((ROOT / "tests" / path).read_text(encoding="utf-8") for path in paths)
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

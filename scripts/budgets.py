"""Print the size of the project, and fail if it exceeds a limit."""

import ast
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
_GENERATED = ("config.md", "cli.md")


def main() -> int:
    """Print one line per budget; return 1 if one is exceeded."""
    code = [path for top in ("hybrid", "workers") for path in (ROOT / top).rglob("*.py")]
    scripts = [path for path in (ROOT / "scripts").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    pages = [path for path in (ROOT / "docs").glob("*.md") if path.name not in _GENERATED]
    keys = (ROOT / "docs/config.md").read_text(encoding="utf-8").splitlines()
    budgets = [
        ("lines of hybrid and workers", _lines(code), 39_399),
        ("lines of tests", _lines((ROOT / "tests").rglob("*.py")), 36_355),
        ("lines of scripts", _lines(path for path in scripts if path.name != "constraints.txt"), 3_093),
        ("configuration keys", sum(line.startswith("| `") for line in keys), 106),
        ("private functions with one caller in their file", sum(map(_count_single_callers, code)), 226),
        ("kB of docs", sum(path.stat().st_size for path in pages) // 1000, 145),
        ("lines of README.md", _lines([ROOT / "README.md"]), 150),
    ]
    for name, size, limit in budgets:
        print(f"{name:<48}{size:>7,} of {limit:>6,}{'  OVER' if size > limit else ''}")
    return int(any(size > limit for _, size, limit in budgets))


def _lines(paths: Iterable[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def _count_single_callers(path: Path) -> int:
    """Return the number of private functions and methods that are named once besides their definition."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    uses = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    uses += Counter(node.attr for node in nodes if isinstance(node, ast.Attribute))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    private = [
        each.name for each in functions if each.name.startswith("_") and not each.name.startswith("__")
    ]
    return sum(uses[name] == 1 for name in private)


if __name__ == "__main__":
    sys.exit(main())

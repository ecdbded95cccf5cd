"""Reading ``upstream`` marks out of test files, which are parsed and not imported.

A mark holds literals, and stands on a test, on a class of tests, or in ``pytestmark``::

    @pytest.mark.upstream("data_parallel/test_scatter_cpu", "data_parallel/_test_scatter")
    def test_scatter_deals_out_contiguous_chunks() -> None: ...
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeGuard

_Scope: TypeAlias = ast.Module | ast.ClassDef | ast.FunctionDef
_UPSTREAM, _GPU, _PARAMETRIZE = (f"pytest.mark.{name}" for name in ("upstream", "gpu", "parametrize"))


class MarkError(Exception):
    """A mark stands where it says nothing of a test, or holds what is no literal."""


@dataclass(frozen=True)
class Marked:
    """A test, or a class or module of tests, with an ``upstream`` mark.

    Attributes:
        file: relative to the folder of all tests.
        name: as pytest has it, such as ``TestGather::test_it``; empty for a module.
        runs_on_cpu: whether any of its tests has a case without a ``gpu`` mark.
        runs_on_gpu: whether any has a case with one.
    """

    file: Path
    name: str
    runs_on_cpu: bool
    runs_on_gpu: bool


@dataclass(frozen=True)
class _Test:
    path: tuple[str, ...]
    runs_on_cpu: bool
    runs_on_gpu: bool


def read_marks(folder: Path) -> dict[str, list[Marked]]:
    """Every marked upstream name, known or not, with the places that bear it, by file and line.

    Raises:
        MarkError: a mark is not on a test, or cannot be read.
    """
    places: dict[str, list[Marked]] = {}
    for path in sorted(folder.rglob("*.py")):
        for name, place in _TestFile(path, folder).marked():
            places.setdefault(name, []).append(place)
    return places


class _TestFile:
    """One file, parsed; the values of its module's names stand for them, imported ones too."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._file = path.relative_to(folder)
        self._tree = ast.parse(path.read_text(encoding="utf-8"))
        self._values = _values_of(self._tree, folder)

    def marked(self) -> Iterator[tuple[str, Marked]]:
        """Pairs of an upstream name and what bears it."""
        tests: list[_Test] = []
        found: list[tuple[tuple[str, ...], ast.Call]] = []
        for path, scope, marks in self._scopes(self._tree, (), []):
            if isinstance(scope, ast.FunctionDef):
                tests.append(self._test(path, marks))
            found += [(path, mark) for mark in self._own_marks(scope) if _is_call_of(mark, _UPSTREAM)]
        all_marks = [node for node in ast.walk(self._tree) if _is_call_of(node, _UPSTREAM)]
        if stray := set(all_marks) - {mark for _, mark in found}:
            raise self._error(min(stray, key=lambda mark: mark.lineno), "is not on a test")
        for path, mark in found:
            place = self._place(path, mark, tests)
            for argument in mark.args:
                yield self._literal(argument), place

    def _scopes(
        self, scope: _Scope, path: tuple[str, ...], marks: list[ast.expr]
    ) -> Iterator[tuple[tuple[str, ...], _Scope, list[ast.expr]]]:
        """The module, its classes of tests and its tests, each with all marks that count for it."""
        marks = [*marks, *self._own_marks(scope)]
        yield path, scope, marks
        if self._file.name.startswith("test_") and not isinstance(scope, ast.FunctionDef):
            for inner in scope.body:
                if (isinstance(inner, ast.FunctionDef) and inner.name.startswith("test")) or (
                    isinstance(inner, ast.ClassDef) and inner.name.startswith("Test")
                ):
                    yield from self._scopes(inner, (*path, inner.name), marks)

    def _own_marks(self, scope: _Scope) -> list[ast.expr]:
        if isinstance(scope, ast.FunctionDef):
            return self._flat(scope.decorator_list)
        assigned = [
            statement.value
            for statement in scope.body
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark"
        ]
        return self._flat([*(scope.decorator_list if isinstance(scope, ast.ClassDef) else []), *assigned])

    def _flat(self, expressions: Sequence[ast.expr]) -> list[ast.expr]:
        """Expressions, with the elements of lists and the values of names in their place."""
        flat: list[ast.expr] = []
        for expression in expressions:
            value = self._values.get(ast.unparse(expression), expression)
            if isinstance(value, ast.List | ast.Tuple):
                flat += self._flat(value.elts)
            elif isinstance(value, ast.expr):
                flat.append(value)
        return flat

    def _test(self, path: tuple[str, ...], marks: list[ast.expr]) -> _Test:
        needs_gpu = any(ast.unparse(mark) == _GPU for mark in marks)
        for mark in marks:
            if _is_call_of(mark, _PARAMETRIZE):
                cases = [self._mentions_gpu(case) for case in self._flat(mark.args[1:2])]
                needs_gpu = needs_gpu or (bool(cases) and all(cases))
        return _Test(path, not needs_gpu, any(self._mentions_gpu(mark) for mark in marks))

    def _mentions_gpu(self, node: ast.AST, seen: frozenset[str] = frozenset()) -> bool:
        nodes = list(ast.walk(node))
        if any(isinstance(inner, ast.Attribute) and ast.unparse(inner) == _GPU for inner in nodes):
            return True
        names = {inner.id for inner in nodes if isinstance(inner, ast.Name)} & self._values.keys() - seen
        return any(self._mentions_gpu(self._values[name], seen | names) for name in names)

    def _place(self, path: tuple[str, ...], mark: ast.Call, tests: list[_Test]) -> Marked:
        under = [test for test in tests if test.path[: len(path)] == path]
        if not under:
            raise self._error(mark, "is not on a test")
        return Marked(
            self._file,
            "::".join(path),
            any(test.runs_on_cpu for test in under),
            any(test.runs_on_gpu for test in under),
        )

    def _literal(self, argument: ast.expr) -> str:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            return argument.value
        raise self._error(argument, "holds what is no literal")

    def _error(self, node: ast.expr, what: str) -> MarkError:
        return MarkError(f"{self._file}:{node.lineno}: {_UPSTREAM} {what}")


def _values_of(tree: ast.Module, folder: Path) -> dict[str, ast.AST]:
    """What each name of a module stands for: an expression or a function, followed into ``folder``."""
    values: dict[str, ast.AST] = {}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            values[statement.name] = statement
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            values[statement.targets[0].id] = statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            values[ast.unparse(statement.target)] = statement.value
        elif isinstance(statement, ast.ImportFrom):
            source = folder / f"{(statement.module or '').replace('.', '/')}.py"
            if source.is_file():
                theirs = _values_of(ast.parse(source.read_text(encoding="utf-8")), folder)
                names = [(alias.asname or alias.name, alias.name) for alias in statement.names]
                values |= {ours: theirs[name] for ours, name in names if name in theirs}
    return values


def _is_call_of(node: ast.AST, name: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name

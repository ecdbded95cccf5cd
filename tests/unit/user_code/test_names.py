"""Functions of the user's own, by name: what travels, and what is looked up."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from os import system
from pathlib import Path
from typing import Any

import pytest

from hybrid.errors import ConfigError
from hybrid.topology import MASTER
from hybrid.user_code.function_names import (
    UserDataclass,
    UserFunction,
    from_reference,
    load_function,
    load_user_object,
    to_reference,
)


def times(factor: int, value: int, plus: int = 0) -> int:
    return factor * value + plus


@dataclass(frozen=True)
class Workload:
    """A value of the user's own, with a method."""

    factor: int
    inner: Workload | None = None

    def scale(self, value: int) -> int:
        return self.factor * value


def apply(workload: Workload, value: int) -> int:
    assert workload.inner is not None
    return workload.inner.scale(value)


@pytest.mark.parametrize(
    ("function", "name", "args"),
    [
        (times, "times", (6, 7)),
        (partial(times, 6), "times", (7,)),
        (partial(partial(times, 6), plus=0), "times", (7,)),
        (Workload(6).scale, "Workload.scale", (7,)),
        (partial(apply, Workload(1, Workload(6))), "apply", (7,)),
    ],
    ids=["function", "partial", "partial of a partial", "method", "dataclass"],
)
def test_a_function_travels_by_name_and_is_the_same_there(
    function: Any, name: str, args: tuple[int, ...]
) -> None:
    travelling = to_reference(function)
    assert isinstance(travelling, UserFunction)
    assert travelling.name == f"{__name__}:{name}"
    assert from_reference(travelling)(*args) == 42


def test_what_travels_holds_no_code() -> None:
    held = to_reference(partial(apply, Workload(1, Workload(6)))).args
    assert held == (UserDataclass(f"{__name__}:Workload", {"factor": 1, "inner": to_reference(Workload(6))}),)


def test_other_values_travel_as_they_are() -> None:
    for value in (3, "a", [1], MASTER, Path("a"), UserFunction):
        assert to_reference(value) is value
        assert from_reference(value) is value


def test_a_function_that_cannot_be_found_does_not_travel() -> None:
    def local() -> None: ...

    for function in (local, lambda: None, partial(local), Path.cwd, pytest.raises, to_reference):
        with pytest.raises(ConfigError, match="must be defined in a module of your own"):
            to_reference(function)


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "subprocess:run",
        "posix:system",
        "builtins:eval",
        "torch:load",
        "numpy.ctypeslib:load_library",
        "hybrid.transport:start",
        "workers.cli:main",
        "__main__:anything",
        "",
        ":",
        ".:a",
    ],
)
def test_what_is_not_the_users_own_is_not_looked_up(name: str) -> None:
    with pytest.raises(ConfigError, match="is not in a module of your own"):
        load_user_object(name)


def test_what_another_python_has_installed_is_not_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``PYTHONPATH`` may name its folder."""
    for folder, module in (("site-packages", "installed_there"), ("mine", "lies_there")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{module}.py").write_text("def make(): ...\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
    assert load_user_object("lies_there:make")
    with pytest.raises(ConfigError, match="is not in a module of your own"):
        load_user_object("installed_there:make")


@pytest.mark.parametrize(
    "name",
    [
        f"{__name__}:system",
        f"{__name__}:load_user_object",
        f"{__name__}:Path",
        f"{__name__}:times.__globals__",
        f"{__name__}:times.__class__",
        f"{__name__}:times.__call__",
        f"{__name__}:Workload.__dict__",
        f"{__name__}:sys.modules",
    ],
)
def test_what_a_module_of_the_users_has_from_elsewhere_is_not_looked_up(name: str) -> None:
    assert system is os.system
    with pytest.raises(ConfigError, match=f"is not defined in {__name__}"):
        load_user_object(name)


class Plain:
    """A class of the user's own that holds no data."""


@pytest.mark.parametrize("name", ["times", "Plain", "Workload.scale"])
def test_a_value_is_a_dataclass_and_nothing_else_is_called_for_one(name: str) -> None:
    fields: dict[str, Any] = {} if name == "Plain" else {"factor": 6, "value": 7}
    with pytest.raises(ConfigError, match="is not a dataclass"):
        from_reference(UserDataclass(f"{__name__}:{name}", fields))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of the user's own, not imported yet."""
    folder = tmp_path / "users_own_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "jobs.py").write_text("def batches(trainer):\n    return [trainer]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder.name
    for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
        del sys.modules[name]


def test_a_module_is_imported_where_its_function_is_needed(package: str) -> None:
    assert load_user_object(f"{package}.jobs:batches")(3) == [3]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("rich:build", "rich.py"),
        ("rich.table:build", "rich/table.py"),
        ("types:build", "types.py"),
        ("torch:build", "torch/__init__.py"),
        ("hybrid:build", "hybrid.py"),
        ("sys:build", "sys.py"),
    ],
)
def test_a_module_whose_name_is_taken_is_told(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither it is imported, nor the other one called."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("raise AssertionError\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(ConfigError) as told:
        load_function("dense.net", name)
    rule = f"is in {file}, but an installed module has the same name; rename your module"
    assert str(told.value) == f"dense.net = {name!r}: {rule}"


def test_a_module_of_the_current_folder_is_found(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_function("dense.net", f"{package}.jobs:batches")(3) == [3]


def test_a_module_that_ends_the_process_is_told(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "ends.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=r"cannot be imported: \S+/ends.py:2, in <module>: SystemExit: 3"):
        load_function("dense.net", f"{package}.ends:build")


def test_a_module_that_is_not_there_is_told_with_the_host(package: str) -> None:
    host, here = socket.gethostname(), os.getcwd()
    missing = f"on host {host}; install it there, or put it into {here}, where this runs"
    for name in (f"{package}.nowhere:batches", "no_such_module:build"):
        module = name.partition(":")[0]
        reason = f"cannot be imported: ModuleNotFoundError: No module named {module!r} {missing}"
        with pytest.raises(ConfigError) as told:
            load_function("dense.net", name)
        assert str(told.value) == f"dense.net = {name!r}: {reason}"
    with pytest.raises(ConfigError) as told:
        load_user_object("no_such_module:build")
    assert str(told.value) == f"FUNCTION = 'no_such_module:build': there is no such module {missing}"

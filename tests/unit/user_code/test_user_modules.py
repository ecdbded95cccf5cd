"""User code by name: references between processes, and looking them up."""

from __future__ import annotations

import importlib.util
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
from hybrid.user_code.user_modules import (
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
    """A user dataclass with a method."""

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
def test_a_function_is_sent_by_name(function: Any, name: str, args: tuple[int, ...]) -> None:
    reference = to_reference(function)
    assert isinstance(reference, UserFunction)
    assert reference.name == f"{__name__}:{name}"
    assert from_reference(reference)(*args) == 42


def test_a_reference_contains_no_code() -> None:
    args = to_reference(partial(apply, Workload(1, Workload(6)))).args
    assert args == (UserDataclass(f"{__name__}:Workload", {"factor": 1, "inner": to_reference(Workload(6))}),)


def test_other_values_are_sent_unchanged() -> None:
    for value in (3, "a", [1], MASTER, Path("a"), UserFunction):
        assert to_reference(value) is value
        assert from_reference(value) is value


def test_a_function_without_an_importable_name_is_refused() -> None:
    def local() -> None: ...

    for function in (local, lambda: None, partial(local), Path.cwd, pytest.raises, to_reference):
        with pytest.raises(ConfigError, match="your modules"):
            to_reference(function)


@pytest.mark.parametrize(
    "name", ["os:system", "builtins:eval", "torch:load", "workers.cli:main", "__main__:anything", "", ".:a"]
)
def test_only_user_modules_are_looked_up(name: str) -> None:
    with pytest.raises(ConfigError, match="your modules"):
        load_user_object(name)


def test_a_package_of_another_python_is_no_user_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``PYTHONPATH`` may name its folder."""
    for folder, module in (("site-packages", "installed_there"), ("mine", "lies_there")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{module}.py").write_text("def make(): ...\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
    assert load_user_object("lies_there:make")
    with pytest.raises(ConfigError, match="your modules"):
        load_user_object("installed_there:make")


@pytest.mark.parametrize(
    "name", ["system", "load_user_object", "Path", "times.__globals__", "times.__call__", "sys.modules"]
)
def test_names_that_a_user_module_does_not_define_are_not_looked_up(name: str) -> None:
    assert system is os.system
    with pytest.raises(ConfigError, match=f"is not defined in {__name__}"):
        load_user_object(f"{__name__}:{name}")


class Plain:
    """A user class that is not a dataclass."""


@pytest.mark.parametrize("name", ["times", "Plain", "Workload.scale"])
def test_only_a_dataclass_is_made_from_fields(name: str) -> None:
    fields: dict[str, Any] = {} if name == "Plain" else {"factor": 6, "value": 7}
    with pytest.raises(ConfigError, match="is not a dataclass"):
        from_reference(UserDataclass(f"{__name__}:{name}", fields))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A user package that is not imported yet."""
    folder = tmp_path / "users_own_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "jobs.py").write_text("def batches(trainer):\n    return [trainer]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder.name
    for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("rich:build", "rich.py"),
        ("rich.table:build", "rich/table.py"),
        ("torch:build", "torch/__init__.py"),
        ("hybrid:build", "hybrid.py"),
        ("sys:build", "sys.py"),
    ],
)
def test_a_module_with_the_name_of_an_installed_one_is_refused(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the two modules is imported."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("raise AssertionError\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(ConfigError, match=rf"^dense\.net = '{name}': is in {file}, but"):
        load_function("dense.net", name)


def test_a_module_of_the_current_folder_is_found(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_user_object(f"{package}.jobs:batches")(3) == [3]
    monkeypatch.chdir(tmp_path)
    assert load_function("dense.net", f"{package}.jobs:batches")(3) == [3]


@pytest.mark.parametrize("given", ["", "folder"])
def test_a_folder_has_modules_for_the_user_only(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules find others beside them, at any time. A library does not find an optional module there."""
    (tmp_path / "site-packages").mkdir()
    function = f"def build():\n    import {given}later\n    return {given}library"
    for name, text in {
        "named": f"import {given}beside, {given}library\n{function}",
        "beside": "",
        "later": "",
        "optional": "raise AssertionError",
        "site-packages/library": f"try: import {given}optional as found\nexcept ImportError: found = None",
    }.items():
        path = tmp_path / name
        path.with_name(f"{given}{path.name}.py").write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site-packages")])
    monkeypatch.chdir("/" if given else tmp_path)
    build = load_function("dense.net", f"{given}named:build", folder=tmp_path if given else None)
    monkeypatch.chdir("/")
    assert build().found is None
    assert importlib.util.find_spec(f"{given}optional") is None


def test_a_module_that_exits_is_an_error(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "ends.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=r"/ends\.py:2, .*SystemExit: 3"):
        load_function("dense.net", f"{package}.ends:build")


def test_a_missing_module_is_an_error_with_the_host(package: str) -> None:
    for name in (f"{package}.nowhere:batches", "no_such_module:build"):
        module, host = name.partition(":")[0], socket.gethostname()
        with pytest.raises(ConfigError, match=rf"{module}.* on host {host}; "):
            load_function("dense.net", name)
    with pytest.raises(ConfigError, match=f"on host {socket.gethostname()}; "):
        load_user_object("no_such_module:build")

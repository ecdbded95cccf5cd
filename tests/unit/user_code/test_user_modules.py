"""User code by name."""

from __future__ import annotations

import importlib.util
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid.errors import ConfigError
from hybrid.user_code.user_modules import load_function


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

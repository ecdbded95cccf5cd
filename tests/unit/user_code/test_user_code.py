"""User code by name; code and paths of a run are used only if its user signed them, or a reader allows it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybrid.config import ClusterSection, DenseSection, RunConfig, RunSection, TaskSection
from hybrid.config.key import Key
from hybrid.config.loading import load_config, to_toml
from hybrid.config.sections import NAMED_KEYS, SECTION_KEYS
from hybrid.errors import ConfigError
from hybrid.user_code.run_signature import load_run_config, signed_toml
from hybrid.user_code.user_modules import load_function
from workers.run_folder.run_access import load_resumed_config
from workers.run_folder.run_files import RunFolder

CUSTOM = RunConfig(dense=DenseSection(net="my_net:build"))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def written(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def check_refused(path: Path, key: str = "dense.net") -> None:
    with pytest.raises(ConfigError, match=f"{path} .*--trust-code") as caught:
        load_run_config(path)
    assert caught.value.key == key


@pytest.mark.parametrize("forged", ["", "0" * 64, "\u00e9"])
def test_code_that_this_user_has_not_signed_is_refused(forged: str, tmp_path: Path, state: Path) -> None:
    text = signed_toml(CUSTOM)
    check_refused(written(tmp_path, text.replace(text.split()[-1], forged)))
    check_refused(written(tmp_path, to_toml(CUSTOM)))
    shutil.rmtree(state)
    path = written(tmp_path, text)
    check_refused(path)
    assert load_run_config(path, trust_code=True) == CUSTOM


@pytest.mark.parametrize("logger", ["evil:Logger", "wandb"])
def test_loggers_of_another_user_receive_nothing(logger: str, tmp_path: Path) -> None:
    written(tmp_path, to_toml(RunConfig(cluster=ClusterSection(loggers=("tensorboard", logger)))))
    assert load_run_config(tmp_path / "config.toml") == RunConfig()
    with pytest.raises(ConfigError, match=rf"^cluster\.loggers = '{logger}': .*not signed"):
        load_resumed_config(tmp_path, [])


def test_a_default_configuration_needs_no_signature(tmp_path: Path, state: Path) -> None:
    assert signed_toml(RunConfig()) == to_toml(RunConfig())
    run = tmp_path / "run"
    RunFolder(run, RunConfig()).close()
    assert load_resumed_config(run, []) == RunConfig()
    assert not state.exists()


def test_a_resumed_run_is_signed_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    RunFolder(run, CUSTOM).close()
    assert load_resumed_config(run, ["train.epochs=2"]).dense.net == "my_net:build"
    written(run, to_toml(CUSTOM))
    with pytest.raises(ConfigError, match="not signed"):
        load_resumed_config(run, [])
    RunFolder(run, load_resumed_config(run, [], trust_code=True), 0).close()
    assert load_resumed_config(run, []) == CUSTOM


def test_concurrent_runs_make_one_private_key(state: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(lambda _: signed_toml(CUSTOM), range(32)))) == 1
    assert [path.name for path in (state / "hybrid").iterdir()] == ["key"]
    modes = [path.stat().st_mode & 0o777 for path in (state / "hybrid", state / "hybrid/key")]
    assert modes == [0o700, 0o600]


@pytest.mark.parametrize("damage", ["mode", "length", "link", "owner", "folder"])
def test_a_key_that_others_may_know_signs_nothing(
    damage: str, tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, signed_toml(CUSTOM))
    key = state / "hybrid/key"
    if damage == "mode":
        key.chmod(0o640)
    elif damage == "length":
        key.write_bytes(b"")
    elif damage == "link":
        key.rename(state / "hybrid/other")
        key.symlink_to("other")
    elif damage == "folder":
        key.parent.chmod(0o777)
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert signed_toml(CUSTOM) == to_toml(CUSTOM)
    check_refused(path)


SECTIONS = {**SECTION_KEYS, **{f"{kind}.C1": keys for kind, keys in NAMED_KEYS.items()}}
NEED_SIGNATURE = {
    f"{section}.{key.name}": key
    for section, keys in SECTIONS.items()
    for key in keys.values()
    if not re.fullmatch(key.unsigned, ":")
}


def another_value(key: Key) -> str:
    """Return a value of a key that is not its default, for ``--set``."""
    if key.kind in (int, float):
        return str(1 + (0 if key.is_list else key.default))
    if key.unsigned:
        return "my:loss"
    if key.name == "joins":
        return "table(/etc/passwd, key = 'user')"
    names = key.choices if key.signatures is None else key.signatures.names
    return next(x for x in (*names, "cpu") if key.convert(x) != key.default)  # also a path, and a host


@pytest.mark.parametrize("dotted", NEED_SIGNATURE)
def test_another_users_value_has_no_effect_unless_allowed(dotted: str, tmp_path: Path, state: Path) -> None:
    section, _, name = dotted.rpartition(".")
    key, kind = NEED_SIGNATURE[dotted], section.partition(".")[0]
    setting = f"{dotted}={another_value(key)}"
    data = ["data.format=csv", "data.sparse=C2", "data.vocabulary=hash"]
    chosen = ["data.path=mine.csv"] if dotted != "data.path" else []
    config = load_config(None, [*data, *chosen, setting])
    run = tmp_path / "run"
    run.mkdir()
    written(run, signed_toml(config))
    assert load_resumed_config(run, []) == load_run_config(run / "config.toml") == config
    shutil.rmtree(state)
    if kind == "run":
        assert load_resumed_config(run, chosen) == config.replace(run=RunSection())
    else:
        with pytest.raises(ConfigError, match=r"^[^\n]*--trust-code") as caught:
            load_resumed_config(run, chosen)
        assert caught.value.key == dotted
        with pytest.raises(ConfigError, match="--trust-code"):
            load_run_config(run / "config.toml", chosen, uses=[kind])
    if key.unsigned:
        check_refused(run / "config.toml", dotted)
    else:
        read = load_run_config(run / "config.toml", chosen)
        assert read == config.replace_value(section, name, key.default)
    assert load_resumed_config(run, [*chosen, setting]).replace(run=config.run) == config
    assert load_resumed_config(run, [], trust_code=True) == config


def test_validation_files_of_another_user_are_refused(tmp_path: Path, state: Path) -> None:
    data = ["data.format=csv", "data.sparse=C2", "data.path=mine.csv"]
    for value in ("random(0.2)", "path(/etc/passwd)"):
        RunFolder(tmp_path / value[:4], load_config(None, [*data, f"data.validation={value}"])).close()
    shutil.rmtree(state)
    load_run_config(tmp_path / "rand/config.toml", data[2:])
    check_refused(tmp_path / "path/config.toml", "data.validation")


LOSSES = RunConfig(tasks={"a": TaskSection(loss="mine:loss", metrics=("mine:lift",)), "b": TaskSection()})


def test_losses_and_metrics_are_signed_one_by_one(tmp_path: Path) -> None:
    text = signed_toml(LOSSES)
    assert load_run_config(written(tmp_path, text)) == LOSSES
    fewer = load_run_config(written(tmp_path, text.replace('metrics = ["mine:lift"]', "metrics = []")))
    assert fewer.tasks["a"].metrics == ()
    for before, after, key in (
        ('"mine:loss"', '"evil:loss"', "tasks.a.loss"),
        ('"mine:lift"', '"evil:lift"', "tasks.a.metrics"),
        ('"mine:lift"', '"mine:loss"', "tasks.a.metrics"),  # signed as a loss only
        ('net = "dlrm"', 'net = "mine:loss"', "dense.net"),
    ):
        check_refused(written(tmp_path, text.replace(before, after)), key)


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
    with pytest.raises(ConfigError, match=rf"^dense\.net = '{name}': .*{file}"):
        load_function("dense.net", name)


@pytest.mark.parametrize("given", ["", "folder"])
def test_a_folder_has_its_users_modules(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        with pytest.raises(ConfigError, match=f"{module}.* {host}; "):
            load_function("dense.net", name)

"""Code and paths of a run are used only if its user has signed them, or the reader allows it."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybrid.config import DenseSection, RunConfig, TaskSection
from hybrid.config.loading import load_config, to_toml
from hybrid.errors import ConfigError
from hybrid.user_code.run_signature import load_run_config, signed_toml
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
    with pytest.raises(ConfigError, match=rf"{path} .*you have not signed it.*--trust-code") as caught:
        load_run_config(path)
    assert caught.value.key == key


def test_signed_code_is_read_from_any_copy(tmp_path: Path) -> None:
    path = written(tmp_path, signed_toml(CUSTOM))
    (tmp_path / "copy").mkdir()
    assert load_run_config(path) == load_config(path) == CUSTOM
    assert load_run_config(Path(shutil.copy(path, tmp_path / "copy"))) == CUSTOM


def test_other_keys_may_be_edited(tmp_path: Path) -> None:
    text = signed_toml(CUSTOM)
    edited = load_run_config(written(tmp_path, text.replace("epochs = 1\n", "epochs = 3\n")))
    assert edited.train.epochs == 3
    check_refused(written(tmp_path, text.replace("my_net:build", "evil:build")))


@pytest.mark.parametrize("forged", ["", "0" * 64, "\u00e9"])
def test_code_that_this_user_has_not_signed_is_refused(forged: str, tmp_path: Path, state: Path) -> None:
    text = signed_toml(CUSTOM)
    check_refused(written(tmp_path, text.replace(text.split()[-1], forged)))
    check_refused(written(tmp_path, to_toml(CUSTOM)))
    shutil.rmtree(state)
    path = written(tmp_path, text)
    check_refused(path)
    assert load_run_config(path, trust_code=True) == CUSTOM


def test_a_default_configuration_needs_no_signature(tmp_path: Path, state: Path) -> None:
    assert signed_toml(RunConfig()) == to_toml(RunConfig())
    run = tmp_path / "run"
    RunFolder.create(run, RunConfig()).close()
    assert load_resumed_config(run, []) == RunConfig()
    assert not state.exists()


def test_a_resumed_run_is_signed_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    RunFolder.create(run, CUSTOM).close()
    assert load_resumed_config(run, ["train.epochs=2"]).dense.net == "my_net:build"
    written(run, to_toml(CUSTOM))
    with pytest.raises(ConfigError, match="you have not signed it"):
        load_resumed_config(run, [])
    RunFolder.reopen(run, load_resumed_config(run, [], trust_code=True), 0).close()
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


@pytest.mark.parametrize(
    "setting",
    [
        "data.path=s3://theirs/clicks.csv",
        "data.test_path=/etc/passwd",
        "data.cache_folder=s3://theirs/cache",
        "data.local_cache_folder=/srv",
        "cluster.secret_file=/root/secret",
        "cluster.master=0.0.0.0",
        "tables.C1.initial=/srv/rows.npy",
    ],
)
def test_paths_of_another_user_are_used_only_if_allowed(setting: str, tmp_path: Path, state: Path) -> None:
    csv = [] if "data.path" in setting else ["data.path=mine.csv"]
    config = load_config(None, [setting, "data.format=csv", "data.sparse=C1", *csv])
    run = tmp_path / "run"
    RunFolder.create(run, config).close()
    assert load_resumed_config(run, ["train.epochs=2"]).train.epochs == 2
    shutil.rmtree(state)
    key = setting.partition("=")[0]
    chosen = [f"data.path={config.data.path[0]}"] if key != "data.path" else []
    with pytest.raises(ConfigError, match=rf"^{key} = .*--trust-code"):
        load_resumed_config(run, chosen)
    assert load_run_config(run / "config.toml") == config, "evaluation on other files uses no path"
    assert load_resumed_config(run, [*chosen, setting]) == config
    assert load_resumed_config(run, [], trust_code=True) == config


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

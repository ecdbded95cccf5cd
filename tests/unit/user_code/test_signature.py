"""Code that a run names is imported where its user has signed it, or allows it, and nowhere else."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybrid.config import DenseSection, RunConfig, TaskSection
from hybrid.config.loading import load_config, to_toml
from hybrid.errors import ConfigError
from hybrid.user_code.run_signature import _key, load_run_config, signed_toml
from workers.run_folder.resume import load_resumed_config
from workers.run_folder.run_files import RunFolder

OWN = RunConfig(dense=DenseSection(net="my_net:build"))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def written(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text)
    return path


def check_refused(path: Path, net: str = "my_net:build") -> None:
    with pytest.raises(ConfigError) as told:
        load_run_config(path)
    assert str(told.value) == (
        f"dense.net = {net!r}: {path} names this code, which would be imported and run, and you have not "
        "signed it; look at it, and then allow it with --trust-code"
    )


def test_what_the_user_has_signed_is_read_wherever_it_lies(tmp_path: Path) -> None:
    path = written(tmp_path, signed_toml(OWN))
    (tmp_path / "copy").mkdir()
    assert load_run_config(path) == OWN
    assert load_run_config(Path(shutil.copy(path, tmp_path / "copy"))) == OWN
    assert load_config(path) == OWN, "to who imports nothing it is a configuration like others"


def test_it_may_be_edited_but_for_the_name_of_the_code(tmp_path: Path) -> None:
    text = signed_toml(OWN)
    edited = load_run_config(written(tmp_path, text.replace("epochs = 1\n", "epochs = 3\n")))
    assert edited.train.epochs == 3
    check_refused(written(tmp_path, text.replace("my_net:build", "evil:build")), "evil:build")


def test_what_nobody_has_signed_is_read_where_the_user_allows_it(tmp_path: Path) -> None:
    path = written(tmp_path, to_toml(OWN))
    check_refused(path)
    assert load_run_config(path, trust_code=True) == OWN


@pytest.mark.parametrize("forged", ["", "0" * 64, "\u00e9"])
def test_what_another_has_signed_is_refused(forged: str, tmp_path: Path, state: Path) -> None:
    text = signed_toml(OWN)
    signature = text.split()[-1]
    check_refused(written(tmp_path, text.replace(signature, forged)))
    shutil.rmtree(state)
    check_refused(written(tmp_path, text))


def test_nets_of_the_project_need_no_signature(tmp_path: Path, state: Path) -> None:
    assert signed_toml(RunConfig()) == to_toml(RunConfig())
    assert load_run_config(written(tmp_path, to_toml(RunConfig()))) == RunConfig()
    assert not state.exists()


def test_a_run_that_goes_on_is_signed_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    RunFolder.create(run, OWN).close()
    assert load_resumed_config(run, ["train.epochs=2"]).dense.net == "my_net:build"
    written(run, to_toml(OWN))
    with pytest.raises(ConfigError, match="you have not signed it"):
        load_resumed_config(run, [])
    RunFolder.reopen(run, load_resumed_config(run, [], trust_code=True), 0).close()
    assert load_resumed_config(run, []) == OWN


def test_the_key_is_the_users_alone_and_made_once(state: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        keys = set(threads.map(lambda _: _key(), range(32)))
    (key,) = keys
    assert key is not None
    assert len(key) == 32
    assert [path.name for path in (state / "hybrid").iterdir()] == ["key"]
    assert (state / "hybrid").stat().st_mode & 0o777 == 0o700
    assert (state / "hybrid/key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("spoil", ["mode", "length", "link", "another's"])
def test_a_key_that_others_may_know_signs_nothing(
    spoil: str, tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, signed_toml(OWN))
    key = state / "hybrid/key"
    if spoil == "mode":
        key.chmod(0o640)
    elif spoil == "length":
        key.write_bytes(b"")
    elif spoil == "link":
        key.rename(state / "hybrid/other")
        key.symlink_to("other")
    else:
        user = os.geteuid()
        monkeypatch.setattr("hybrid.user_code.run_signature.private_user_folder", lambda *_: key.parent)
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert signed_toml(OWN) == to_toml(OWN)
    check_refused(path)


def test_without_a_place_for_a_key_runs_are_unsigned(state: Path) -> None:
    state.touch()
    assert signed_toml(OWN) == to_toml(OWN)


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
    assert load_run_config(run / "config.toml") == config, "to evaluate the model on files takes none"
    assert load_resumed_config(run, [*chosen, setting]) == config
    assert load_resumed_config(run, [], trust_code=True) == config


LOSSES = RunConfig(tasks={"a": TaskSection(loss="mine:loss", metrics=("mine:lift",)), "b": TaskSection()})


def test_losses_and_metrics_are_signed_each_by_itself(tmp_path: Path) -> None:
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
        with pytest.raises(ConfigError, match=rf"^{key} = .*you have not signed it"):
            load_run_config(written(tmp_path, text.replace(before, after)))

"""Private folders for compiled code, which are chosen before torch is imported."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

import hybrid
from hybrid.storage.private_files import choose_compile_cache
from workers import cli
from workers.cli import commands

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "QUACK_CACHE_DIR": "quack"}

HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (*VARIABLES, "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")  # monkeypatch restores it
    for name in (HEADERS, "MPLCONFIGDIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def chosen() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES}


@pytest.mark.parametrize("choose", [choose_compile_cache, hybrid.connect], ids=["command", "one process"])
def test_torch_compiles_into_a_private_folder_of_the_user(choose: Callable[[], object], home: Path) -> None:
    """A release of torch that uses other folders fails here."""
    choose()
    assert chosen() == {name: f"{home}/.cache/hybrid/torch/{sub}" for name, sub in VARIABLES.items()}
    assert (home / ".cache/hybrid/torch").stat().st_mode & 0o777 == 0o700
    assert cache_dir() == f"{home}/.cache/hybrid/torch/inductor"
    assert triton_cache_dir(0) == f"{home}/.cache/hybrid/torch/inductor/triton/0"
    assert "MPLCONFIGDIR" not in os.environ
    assert os.environ[HEADERS] == "0", "precompiled headers would be in a folder that anybody can make first"


def test_variables_of_the_user_stay(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.setenv(HEADERS, "1")
    choose_compile_cache()
    quack = f"{home}/.cache/hybrid/torch/quack"
    assert chosen() == {"TORCHINDUCTOR_CACHE_DIR": "mine", "QUACK_CACHE_DIR": quack}
    assert os.environ[HEADERS] == "1"


def test_a_folder_that_others_can_write_is_replaced_by_a_new_one(home: Path) -> None:
    (home / ".cache/hybrid/torch").mkdir(parents=True)
    (home / ".cache/hybrid/torch").chmod(0o777)
    choose_compile_cache()
    (new,) = {Path(path).parent for path in chosen().values()}
    assert new.name.startswith("hybrid-torch-")
    assert os.environ["MPLCONFIGDIR"] == str(new)
    assert new.stat().st_mode & 0o777 == 0o700


def test_a_temporary_folder_is_removed_with_its_process(tmp_path: Path) -> None:
    (tmp_path / ".cache").touch()
    code = "from hybrid.storage.private_files import *; choose_compile_cache(); print(len(os.listdir()))"
    kept = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "XDG_CACHE_HOME")}
    ended = subprocess.run(
        [sys.executable, "-c", f"import os; {code}"],
        env={**kept, "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=20,
    )  # fmt: skip
    assert ended.stdout == "2\n"
    assert [path.name for path in tmp_path.iterdir()] == [".cache"]


@pytest.mark.parametrize(
    "arguments",
    [["launch"], ["compare"], ["run", "train.py"], ["plan"], ["evaluate", "nothing"], ["master"],
     ["predict", "nothing", "--output", "p.csv"], ["trainer", "--index", "0", "--master", "a"],
     ["worker", "--index", "0", "--master", "a"]],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_commands_choose_the_folder_before_they_import_torch(
    arguments: list[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        assert chosen()["TORCHINDUCTOR_CACHE_DIR"] == f"{home}/.cache/hybrid/torch/inductor"
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, f"{arguments[0]}_command", stop)
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 130

"""What torch compiles is kept where nobody else can put anything, before torch is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

from workers import cli
from workers.compile_cache import choose_compile_cache

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "QUACK_CACHE_DIR": "quack"}

HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (*VARIABLES, "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile is undone
    monkeypatch.setenv(HEADERS, "")
    monkeypatch.delenv(HEADERS)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def chosen() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES}


def test_it_is_among_the_users_own_caches(home: Path) -> None:
    choose_compile_cache()
    assert chosen() == {name: f"{home}/.cache/hybrid/torch/{sub}" for name, sub in VARIABLES.items()}
    assert (home / ".cache/hybrid/torch").stat().st_mode & 0o777 == 0o700


def test_torch_keeps_there_what_it_compiles(home: Path) -> None:
    """What a new release of torch keeps elsewhere fails here."""
    choose_compile_cache()

    assert cache_dir() == f"{home}/.cache/hybrid/torch/inductor"
    assert triton_cache_dir(0) == f"{home}/.cache/hybrid/torch/inductor/triton/0"
    # It needs packages of a GPU.
    quack = Path(torch.__file__).with_name("_vendor") / "quack/cache/__init__.py"
    assert 'os.getenv("QUACK_CACHE_DIR"' in quack.read_text()


def test_headers_that_torch_compiles_beforehand_are_not_taken_from_the_temporary_folder(home: Path) -> None:
    """It keeps them there, under a name that anybody can take first, whatever is named for its cache."""
    choose_compile_cache()
    assert os.environ[HEADERS] == "0"
    assert HEADERS in Path(config.__file__).read_text(), "torch reads it when it is imported"


def test_what_the_user_has_set_is_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.setenv(HEADERS, "1")
    choose_compile_cache()
    assert os.environ[HEADERS] == "1"
    assert chosen() == {
        "TORCHINDUCTOR_CACHE_DIR": "mine",
        "QUACK_CACHE_DIR": f"{home}/.cache/hybrid/torch/quack",
    }


def test_where_others_could_put_something_it_is_a_fresh_folder(home: Path) -> None:
    (home / ".cache/hybrid/torch").mkdir(parents=True)
    (home / ".cache/hybrid/torch").chmod(0o777)
    choose_compile_cache()
    (fresh,) = {Path(path).parent for path in chosen().values()}
    assert fresh.name.startswith("hybrid-torch-")
    assert fresh.stat().st_mode & 0o777 == 0o700


def test_a_fresh_folder_goes_with_its_process(tmp_path: Path) -> None:
    (tmp_path / ".cache").touch()
    code = "from workers.compile_cache import *; choose_compile_cache(); print(len(os.listdir()))"
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
    [["launch"], ["compare"], ["run", "own:main"], ["plan"], ["evaluate", "nothing"], ["master"],
     ["predict", "nothing", "--output", "p.csv"], ["trainer", "--index", "0", "--master", "a"],
     ["worker", "--index", "0", "--master", "a"]],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_every_command_that_may_import_torch_sets_it_first(
    arguments: list[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        assert chosen()["TORCHINDUCTOR_CACHE_DIR"] == f"{home}/.cache/hybrid/torch/inductor"
        raise KeyboardInterrupt

    monkeypatch.setitem(cli._COMMANDS, arguments[0], stop)
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 130

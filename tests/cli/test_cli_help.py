"""Commands without a cluster: help, the reference of all keys, the secret, the plan; and the wheel."""

import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
from support.commands import ROOT, refusal, settings

from hybrid.config import RunConfig
from hybrid.config.loading import load_config
from hybrid.security.secret import VARIABLE
from workers.cli import main

COMMANDS = [
    *("launch", "compare", "run", "master", "trainer", "worker", "role"),
    *("plan", "evaluate", "predict", "export", "report", "config", "secret"),
]
# Runs commands one after another, and fails if one has imported a slow module.
SPY = """
import json, sys
from workers.cli import main
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
    slow = {"torch", "numpy", "pyarrow", "matplotlib"} & set(sys.modules)
    assert not slow, (arguments, slow)
"""


def test_help_and_configuration_import_no_slow_module() -> None:
    commands = [["--help"], ["--version"], *([c, "--help"] for c in COMMANDS), ["config"]]
    spy = [sys.executable, "-c", SPY, json.dumps([*commands, ["config", "--describe"]])]
    ended = subprocess.run(spy, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), ([], 2)])
def test_help_lists_all_commands(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    printed = capsys.readouterr()
    assert (end.value.code, printed.err) == (code, "")
    assert re.findall(r"^    (\w+) ", printed.out, re.MULTILINE) == COMMANDS


@pytest.mark.parametrize(
    ("command", "suggestion"), [("lunch", "did you mean 'launch'?"), ("xyzzy", "secret")]
)
def test_an_unknown_command_fails(command: str, suggestion: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command])
    assert end.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith(suggestion)


def test_config_prints_the_values_in_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[train]\nepochs = 3\n")
    main(["config", "--config", str(tmp_path / "run.toml"), *settings(train={"batch_size": 64})])
    printed = capsys.readouterr().out
    train = tomllib.loads(printed)["train"]
    assert (train["epochs"], train["batch_size"]) == (3, 64)
    (tmp_path / "again.toml").write_text(printed)
    again = load_config(tmp_path / "again.toml")
    assert again.replace(train=RunConfig().train) == RunConfig()


def test_secret_command_writes_a_private_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "secret"
    main(["secret", str(file)])
    assert file.stat().st_mode & 0o777 == 0o600
    printed = capsys.readouterr().out
    assert f"--set cluster.secret_file={file}\n" in printed
    assert f'export {VARIABLE}="$(cat {file})"\n' in printed
    assert file.read_text().strip() not in printed
    assert str(file) in refusal("secret", file)


TRILLION = ["plan", "--config", "configs/trillion.toml", "--hosts", "1000", "--memory", "64"]


def memory_kib(name: str) -> int:
    """Return a field of /proc/self/status: VmRSS is memory in use, VmHWM the most so far."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1])


def test_trillion_parameters_are_planned_within_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    cluster = settings(cluster={"trainers": 1000, "workers": 1000}, train={"batch_size": 2_048_000})
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from now on
    begun, in_use = time.process_time(), memory_kib("VmRSS")
    main([*TRILLION, *cluster])
    assert time.process_time() - begun < 20
    assert memory_kib("VmHWM") - in_use < 200 << 10
    printed = capsys.readouterr().out
    assert sum("workers 0-999" in line for line in printed.splitlines()) == 26
    assert "trainer -> worker        1,000,000" in printed
    assert re.search(r"(?m)^network .* at least [\d.]+ ms between hosts$", printed)


def test_wheel_has_the_two_packages_and_the_command(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("hybrid_parallel-*-py3-none-any.whl")
    with ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        (commands,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        assert "hybrid = workers.cli:main" in archive.read(commands).decode()
    folders = (ROOT / "hybrid", ROOT / "workers")
    sources = (
        path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".css", ".typed")
    )
    assert files == {str(path.relative_to(ROOT)) for path in sources}

"""Commands without a cluster: help, the reference of all keys, and the plan."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.commands import ROOT, settings

from hybrid.config import RunConfig
from hybrid.config.loading import load_config
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
def test_help_lists_every_command(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    printed = capsys.readouterr()
    assert (end.value.code, printed.err) == (code, "")
    assert re.findall(r"^    (\w+) ", printed.out, re.MULTILINE) == COMMANDS


@pytest.mark.parametrize(
    ("command", "suggestion"), [("lunch", "did you mean 'launch'?"), ("xyzzy", "secret")]
)
def test_unknown_command_is_a_usage_error(
    command: str, suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
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


TRILLION = ["plan", "--config", "configs/trillion.toml", "--hosts", "1000", "--memory", "64"]
# Runs a command, and prints its processor time and memory (MiB) without those of its imports.
MEASURE = """
import resource, sys, time
from workers.cli import main
import torch, torch._dynamo
before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
main(sys.argv[1:])
after = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("MEASURED", after[0] - before[0], (after[1] - before[1]) / 1024)
"""


def test_trillion_parameters_are_planned_within_seconds() -> None:
    cluster = settings(cluster={"trainers": 1000, "workers": 1000}, train={"batch_size": 2_048_000})
    command = [sys.executable, "-c", MEASURE, *TRILLION, *cluster]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    *printed, measured = ended.stdout.splitlines()
    assert sum("workers 0-999" in line for line in printed) == 26
    assert "trainer -> worker        1,000,000" in ended.stdout
    assert re.search(r"(?m)^network .* at least [\d.]+ ms between hosts$", ended.stdout)
    seconds, mebibytes = map(float, measured.split()[1:])
    assert seconds < 20
    assert mebibytes < 200

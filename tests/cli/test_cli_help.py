"""What needs no cluster: help, the reference of all keys, the plan; and that they answer at once."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.commands import ROOT, output_of, settings

from hybrid.config import RunConfig
from hybrid.config.file import load_config
from hybrid.config.page import describe
from workers.cli import main

COMMANDS = [
    *("launch", "compare", "run", "master", "trainer", "worker"),
    *("plan", "evaluate", "predict", "config", "secret"),
]
# Runs a command, then says which slow modules it has imported.
SPY = """
import sys
from workers.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print("SLOW", sorted({"torch", "numpy", "pyarrow", "matplotlib"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], *([c, "--help"] for c in COMMANDS), ["config"], ["config", "--describe"]],
    ids=" ".join,
)
def test_it_answers_without_torch(arguments: list[str]) -> None:
    command = [sys.executable, "-c", SPY, *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    assert ended.stdout.endswith("SLOW []\n")
    assert ended.stderr == ""


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    listed = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert listed == COMMANDS


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["lunch"])
    assert end.value.code == 2
    choices = ", ".join(map(repr, COMMANDS))
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"hybrid: error: argument COMMAND: invalid choice: 'lunch' (choose from {choices})"
    )


def test_config_prints_what_is_in_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[train]\nepochs = 3\n")
    main(["config", "--config", str(tmp_path / "run.toml"), *settings(train={"batch_size": 64})])
    printed = capsys.readouterr().out
    train = tomllib.loads(printed)["train"]
    assert (train["epochs"], train["batch_size"]) == (3, 64)
    (tmp_path / "again.toml").write_text(printed)
    again = load_config(tmp_path / "again.toml")
    assert again.replace(train=RunConfig().train) == RunConfig()


def test_config_describes_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config", "--describe"])
    assert capsys.readouterr().out == describe()


def test_the_plan_shows_every_table_and_worker(tiny: list[str], tmp_path: Path) -> None:
    said = output_of(["plan", *tiny, "--set", 'tables.C1.placement="row"'], tmp_path)
    lines = [line.rstrip() for line in said.splitlines()]
    tables = dict(re.findall(r"^(C\d+) .* +[\d.]+ (workers? [\d, ]+)$", "\n".join(lines), re.MULTILINE))
    assert set(tables) == {f"C{k}" for k in range(1, 27)}
    assert tables["C1"] == "workers 0, 1"
    assert tables["C2"] in ("worker 0", "worker 1")
    assert max(map(len, lines)) <= 60
    assert lines[-3].startswith("worker tables ")
    assert [line[0] for line in lines[-2:]] == ["0", "1"]
    assert not (tmp_path / "runs").exists()

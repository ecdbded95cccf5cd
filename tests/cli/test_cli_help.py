"""What needs no cluster: help, the reference of all keys, the plan; and that they answer at once."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.commands import ROOT, output_of, settings

from hybrid.config import RunConfig
from hybrid.config.loading import describe, load_config
from workers.cli import main

COMMANDS = [
    *("launch", "compare", "run", "master", "trainer", "worker", "role"),
    *("plan", "evaluate", "predict", "export", "import", "config", "secret"),
]
# Runs commands one after the other, and fails where one has imported a slow module.
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


def test_help_and_configuration_come_without_torch() -> None:
    commands = [["--help"], ["--version"], *([c, "--help"] for c in COMMANDS), ["config"]]
    spy = [sys.executable, "-c", SPY, json.dumps([*commands, ["config", "--describe"]])]
    ended = subprocess.run(spy, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


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
    assert capsys.readouterr().err.splitlines()[-1].endswith("did you mean 'launch'?")


def test_a_command_like_no_other_lists_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["xyzzy"])
    assert end.value.code == 2
    assert ", ".join(COMMANDS) in " ".join(capsys.readouterr().err.split())


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert re.findall(r"^    (\w+) ", printed.out, re.MULTILINE) == COMMANDS
    assert printed.err == ""


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
    of_tables, of_workers, of_links, forecast = said.split("\n\n")
    tables = dict(re.findall(r"(?m)^(C\d+) .* +[\d.]+ (workers? [\d, ]+?) *$", of_tables))
    assert set(tables) == {f"C{k}" for k in range(1, 27)}
    assert tables["C1"] == "workers 0, 1"
    assert tables["C2"] in ("worker 0", "worker 1")
    assert max(len(line.rstrip()) for line in of_tables.splitlines()) <= 60
    assert [line.split()[0] for line in of_workers.splitlines()] == ["worker", "0", "1"]
    assert [line[:17] for line in of_links.splitlines()[1:]] == ["trainer -> worker", "worker -> trainer"]
    assert [line.split()[0] for line in forecast.splitlines()[::2]] == ["memory", "samples/s", "alone,"]
    assert not (tmp_path / "runs").exists()


TRILLION = ["plan", "--config", "configs/trillion.toml", "--hosts", "1000", "--memory", "64"]
# Runs a command, and says what processor time, and memory in MiB, it took beyond what it imports.
MEASURE = """
import resource, sys, time
from workers.cli import main
import torch, torch.utils.flop_counter, torch._dynamo
before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
main(sys.argv[1:])
after = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("MEASURED", after[0] - before[0], (after[1] - before[1]) / 1024)
"""


def test_a_trillion_parameters_on_a_thousand_workers_are_planned_within_seconds() -> None:
    cluster = settings(cluster={"trainers": 1000, "workers": 1000}, train={"batch_size": 2_048_000})
    command = [sys.executable, "-c", MEASURE, *TRILLION, *cluster]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    *printed, measured = ended.stdout.splitlines()
    assert sum("workers 0-999" in line for line in printed) == 26
    assert "trainer -> worker        1,000,000" in ended.stdout
    assert re.search(r"(?m)^limited by  (trainers|workers)' cores \(.*socket message \d\d%", ended.stdout)
    seconds, mebibytes = map(float, measured.split()[1:])
    assert seconds < 20
    assert mebibytes < 200

"""The tour of the examples, as a user runs it."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ROOT, result_of

from hybrid.config.loading import load_config
from workers.cli.arguments import parse

TOUR = ROOT / "examples/tour.sh"


def test_commands_and_configuration_of_the_tour_are_valid(tmp_path: Path) -> None:
    """Other tests of commands run each of these commands."""
    text = TOUR.read_text(encoding="utf-8")
    commands = [
        shlex.split(line)[1:] for line in re.findall(r"^(?:.*\| )?(hybrid [^>\n]*)", text, re.MULTILINE)
    ]
    names = [parse(arguments).command for arguments in commands]
    assert names == ["launch", "launch", "evaluate", "predict", "export"]
    (toml,) = re.findall(r"<<'TOML'\n(.*?)^TOML$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "clicks.toml").write_text(toml)
    assert load_config(tmp_path / "clicks.toml", commands[0][-1:]).train.max_steps == 80


@pytest.mark.long
def test_tour_resumes_a_run_and_predicts_each_new_row(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [TOUR, tmp_path / "tour"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "resuming from step 80" in ended.stdout
    assert result_of(tmp_path / "tour/run")["auc"] > 0.72
    assert len((tmp_path / "tour/predictions.csv").read_text().splitlines()) == 1001
    assert (tmp_path / "tour/export/program.pt2").is_file()

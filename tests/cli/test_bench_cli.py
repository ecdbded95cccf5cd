"""The command line of the bench: help that answers at once, and arguments that are refused."""

import subprocess
import sys

import pytest
from benchmark.__main__ import main
from support.commands import ROOT

COMMANDS = ("compare", "start", "prepare")
OPTIONS = ("--quick", "--systems", "ours-sync", "torchrec-pipelined", "W1,W2,W3", "60 of W1")
# Asks for all help there is, then says which slow modules that has imported.
SPY = """
import sys
from benchmark.__main__ import main
for arguments in (["--help"], *([command, "--help"] for command in sys.argv[1:])):
    try:
        main(arguments)
    except SystemExit as end:
        assert not end.code, end.code
print("SLOW", sorted({"torch", "numpy", "matplotlib"} & set(sys.modules)))
"""


def test_help_answers_without_torch() -> None:
    command = [sys.executable, "-c", SPY, *COMMANDS]
    environment = {"PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}", "COLUMNS": "200"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=True)
    assert ended.stderr == ""
    assert ended.stdout.endswith("SLOW []\n")
    general = ended.stdout.partition("usage: scripts/bench compare")[0]
    assert [word for word in (*COMMANDS, *OPTIONS) if word not in general] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "ours-sync,theirs"], "argument --systems: no system 'theirs'; there are ours-sync, "),
        (["--systems", ""], "argument --systems: no system ''; there are ours-sync, "),
        (["compare", "--workloads", "W9"], "argument --workloads: no workload 'W9'; there are W1, W2, W3"),
        (["--products", "mkl"], "argument --products: no products 'mkl'; there are float32, bfloat16"),
        (["--rounds", "0"], "argument --rounds: must be a whole number of at least 1: '0'"),
        (["--steps", "many"], "argument --steps: must be a whole number of at least 1: 'many'"),
        (["--rounds", "2", "start"], "unrecognized arguments: start"),
        (["scale"], "invalid choice: 'scale'"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err

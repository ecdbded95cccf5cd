"""Arguments of commands."""

from pathlib import Path

import pytest

from workers.cli.arguments import parse
from workers.console.messages import Verbosity


@pytest.mark.parametrize("arguments", [["RUN", "--input", "a"], ["--input", "a", "--output", "o", "RUN"]])
def test_run_and_input_in_any_order(arguments: list[str]) -> None:
    options = parse(["predict", *arguments])
    assert (options.run_folder, options.input) == (Path("RUN"), ["a"])


def test_a_run_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["evaluate", "--input", "a", "RUN"])  # an option of several values takes all that follow it
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith("the following arguments are required: RUN\n")


@pytest.mark.parametrize(
    ("arguments", "verbosity"),
    [
        (["launch"], Verbosity.NORMAL),
        (["launch", "-q"], Verbosity.QUIET),
        (["--quiet", "launch"], Verbosity.QUIET),
        (["-v", "launch"], Verbosity.VERBOSE),
        (["launch", "--verbose"], Verbosity.VERBOSE),
        (["-v", "run", "script.py", "--", "-q"], Verbosity.VERBOSE),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_verbosity_may_come_before_or_after_the_command(arguments: list[str], verbosity: Verbosity) -> None:
    assert parse(arguments).verbosity is verbosity

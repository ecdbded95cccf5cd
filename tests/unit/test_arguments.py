"""Arguments of commands, in every order."""

from pathlib import Path

import pytest

from workers.arguments import parse
from workers.console.messages import Verbosity


@pytest.mark.parametrize(
    "arguments",
    [
        ["RUN", "--input", "a", "b"],
        ["--input", "a", "b", "RUN"],
        ["--input", "a", "b", "--", "RUN"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("command", [["evaluate"], ["predict", "--output", "o"]], ids=" ".join)
def test_the_run_may_stand_before_its_input_or_behind_it(command: list[str], arguments: list[str]) -> None:
    options = parse([*command, *arguments])
    assert (options.run_folder, options.input) == (Path("RUN"), ["a", "b"])


def test_an_option_between_them_is_no_obstacle() -> None:
    options = parse(["predict", "--input", "a", "RUN", "--output", "o"])
    assert (options.run_folder, options.input, options.output) == (Path("RUN"), ["a"], Path("o"))


@pytest.mark.parametrize("arguments", [[], ["--input", "a"]], ids=["nothing", "only files"])
def test_a_run_must_be_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["evaluate", *arguments])
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith("hybrid: error: evaluate: RUN is missing\n")


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

"""Text from files on a terminal, and log records by verbosity."""

import io
import logging

import pytest
from rich.console import Console

from workers import cli
from workers.console.messages import Verbosity, logging_to_stderr, visible
from workers.console.terminal import TerminalView

HOSTILE = "a\x1b[31mb\x07\x00\x7f\x9b2J\u202ec\u2066\u2028\udc80"
SHOWN = r"a\x1b[31mb\x07\x00\x7f\x9b2J\u202ec\u2066\u2028\udc80"


def test_invisible_characters_are_escaped() -> None:
    assert visible(HOSTILE) == SHOWN
    assert visible("a\nb\tc\r") == r"a\nb\tc\r"
    for text in ("", "Zürich, 東京 🙂 é", "[red]x[/red]", r"back\\slash"):
        assert visible(text) == text
    assert all(visible(chr(i)).isprintable() for i in range(0xA0) if i != 0x20)


@pytest.mark.parametrize("is_live", [False, True])
def test_the_view_shows_them_escaped(is_live: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_live, width=200, color_system=None)
    with TerminalView(console) as view:
        view.status(HOSTILE)
        view.note(HOSTILE)
    assert out.getvalue().count(SHOWN) >= 2
    assert not set("\x07\x00\x7f\x9b\u202e\u2066\u2028\udc80") & set(out.getvalue())


def test_an_error_shows_them_escaped(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(
            ["plan", "--set", "data.format=csv", "--set", "data.sparse=c", "--set", f"data.path={HOSTILE}"]
        )
    assert "\x1b" not in str(ended.value)
    assert r"\x1b[31m" in str(ended.value)


LEVELS = ("debug", "info", "warning", "error")


@pytest.mark.parametrize(
    ("verbosity", "is_role_log", "logged"),
    [
        (Verbosity.QUIET, False, LEVELS[3:]),
        (Verbosity.VERBOSE, False, LEVELS[1:]),
        (Verbosity.QUIET, True, LEVELS[1:]),
        (Verbosity.VERBOSE, True, LEVELS),
    ],
)
def test_log_records_go_to_stderr_by_verbosity(
    verbosity: Verbosity, is_role_log: bool, logged: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("workers.somewhere")
    with logging_to_stderr(verbosity, is_role_log=is_role_log):
        for level in LEVELS:
            logger.log(getattr(logging, level.upper()), "a record")
    logger.error("after the block")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2].lower() for line in lines] == [*logged]
    assert all(line.endswith("workers.somewhere: a record") for line in lines)


@pytest.mark.parametrize("verbosity", [*Verbosity])
def test_a_quiet_view_shows_warnings_only(verbosity: Verbosity) -> None:
    out = io.StringIO()
    with logging_to_stderr(verbosity), TerminalView(Console(file=out, force_terminal=False)) as view:
        view.status("reading")
        view.note("26 tables")
        view.warn("skipped 2 rows")
    shown = ["skipped 2 rows"] if verbosity is Verbosity.QUIET else ["reading", "26 tables", "skipped 2 rows"]
    assert out.getvalue().splitlines() == shown

"""The view of a run, on a terminal and in a pipe: escaped text, log records by verbosity, and lost output."""

import dataclasses
import io
import logging
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.commands import ROOT
from support.progress import METRICS as ALL_METRICS, progress

from hybrid.config import RunConfig
from hybrid.config.task_sections import shown_metrics
from workers import cli
from workers.console import TerminalView, Verbosity, logging_to_stderr, transient_status, visible

PROGRESS = progress(
    1200,
    total_steps=5860,
    epochs=2,
    loss=0.45321,
    score=0.77123,
    samples_per_second=31234.5,
    seconds_left=3723.4,
)
METRICS = {name: ALL_METRICS[name] for name in shown_metrics(RunConfig().all_tasks)}
RESULTS = {"test AUC": "0.7712 at step 5,860", "run folder": "runs/" + "a-very-long-name-" * 8}
COMMANDS = {"resume": ".venv/bin/hybrid launch --resume runs/run-20261122-102340 --set train.epochs=2"}


def plain_view() -> tuple[TerminalView, io.StringIO]:
    file = io.StringIO()
    return TerminalView(Console(file=file, force_terminal=False, width=80)), file


def plain_progress(**changes: Any) -> str:
    """Return the line of a log step in a pipe."""
    view, file = plain_view()
    view.progress(dataclasses.replace(PROGRESS, **changes))
    return file.getvalue()


def terminal_view(width: int = 100, **variables: str) -> tuple[TerminalView, io.StringIO]:
    file = io.StringIO()
    environment = {"TERM": "xterm-256color", **variables}
    return TerminalView(Console(file=file, force_terminal=True, width=width, _environ=environment)), file


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows, from the few escape codes of rich's live region."""
    lines, row = [""], 0
    for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.endswith("A") and token[0] == "\x1b":
            row -= int(token[2:-1] or 1)
        elif token == "\x1b[2K":
            lines[row] = ""
        elif token[0] not in "\x1b\r":
            lines[row] += token
    return [line.rstrip() for line in lines]


def test_plain_lines_are_not_broken() -> None:
    view, file = plain_view()
    with view:
        view.status("waiting for 2 trainers")
        view.progress(PROGRESS)
        view.evaluation("test", 1200, METRICS)
        view.summary(RESULTS, COMMANDS)
    assert file.getvalue().splitlines() == [
        "waiting for 2 trainers",
        "step 1200/5860  epoch 1/2  loss 0.4532  AUC 0.7712  samples/s 31,234  left 1:02:03"
        "  data 0%  lookup 25%  dense 25%  backward 50%  update 0%",
        "test at step 1,200  AUC 0.7712  log loss 0.4532  normalized entropy 0.8123  calibration 1.0100",
        "",
        "test AUC            0.7712 at step 5,860",
        f"run folder          {RESULTS['run folder']}",
        f"resume              {COMMANDS['resume']}",
    ]


def test_unknown_numbers_are_shown_as_unknown() -> None:
    line = plain_progress(score=math.nan, seconds_left=math.nan, phase_seconds={"data": 0.0})
    assert "  AUC unknown  samples/s 31,234  left unknown  data 0%\n" in line
    assert "  left 1:00  " in plain_progress(seconds_left=59.6)


def test_live_region_shows_latest_step_below_evaluations() -> None:
    view, file = terminal_view()
    with view:
        view.status("waiting for 2 trainers")
        assert screen(file.getvalue())[-1] == "waiting for 2 trainers"
        view.progress(dataclasses.replace(PROGRESS, step=10, loss=0.9))
        view.evaluation("test", 10, METRICS)
        view.progress(PROGRESS)
        view.status("saving a checkpoint")
        evaluation, bar, numbers, phases, status = screen(file.getvalue())
    assert evaluation.startswith("test at step 10  AUC 0.7712")
    assert re.fullmatch(r"epoch 1/2 ━{14}[━╸╺]{59} step 1,200/5,860", bar)
    assert numbers == "loss 0.4532   AUC 0.7712   samples/s 31,234   left 1:02:03"
    assert phases == "data 0%   lookup 25%   dense 25%   backward 50%   update 0%"
    assert status == "saving a checkpoint"


def _fail_after_a_step(view: TerminalView) -> None:
    view.progress(PROGRESS)
    raise KeyError


def test_live_region_is_removed_and_cursor_restored_at_the_end() -> None:
    view, file = terminal_view()
    with view:
        view.progress(PROGRESS)
        view.summary(RESULTS, COMMANDS)
    failed, of_failed = terminal_view()
    with pytest.raises(KeyError), failed:
        _fail_after_a_step(failed)
    assert [line[:8] for line in screen(file.getvalue()) if line] == ["test AUC", "run fold", "resume  "]
    assert not any(screen(of_failed.getvalue()))
    for written in (file.getvalue(), of_failed.getvalue()):
        assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")


@pytest.mark.parametrize("width", [30, 60])
def test_narrow_terminal_cuts_no_word(width: int) -> None:
    view, file = terminal_view(width, NO_COLOR="1")
    status = "preparing " + "/a-long-folder" * 4
    with view:
        view.progress(PROGRESS)
        view.status(status)
        view.evaluation("test", 1200, METRICS)
        view.note("a note of several words that is longer than some terminals")
        lines = screen(file.getvalue())
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for part in ("step 1,200/5,860", "samples/s 31,234", "backward 50%"):
        assert any(part in line for line in lines), part
    assert "a note of several words that is longer than some terminals" in text
    assert "normalized entropy 0.8123 calibration 1.0100" in text
    assert status.replace(" ", "") in "".join(lines).replace(" ", "")


@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_passing_status_is_shown_on_a_terminal_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    file = io.StringIO()
    monkeypatch.setattr(file, "isatty", lambda: kind == "terminal")
    monkeypatch.setattr(sys, "stderr", file)
    with transient_status() as report:
        report("reading the model")
        assert ("reading the model" in file.getvalue()) == (kind == "terminal")
    assert not any(screen(file.getvalue()))


def test_pipe_gets_no_escape_codes_if_color_is_forced() -> None:
    code = (
        "import sys\nfrom workers.console import TerminalView\n"
        "with TerminalView() as view: view.status('[bold]starting')\nsys.exit('torch' in sys.modules)"
    )
    command, forced = [sys.executable, "-c", code], {"FORCE_COLOR": "1", "TERM": "xterm"}
    run = subprocess.run(command, cwd=ROOT, env=forced, capture_output=True, check=True)
    assert run.stdout == b"[bold]starting\n"


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


# Prints a lot, then reports its end in a file.
RUN = """
import sys
from workers.console import tolerate_lost_output
with tolerate_lost_output("hybrid launch", run_continues=%r) as lost:
    for number in range(20_000):
        print("step", number)
    sys.stdout.flush()
    print("a word", file=sys.stderr)
    open("ended", "w").write(str(bool(lost)))
    assert open("another", "w").fileno() > 2
"""


def ended(folder: Path, redirection: str, run_continues: bool) -> tuple[str, str]:
    """Return stderr of a run under a shell, and whether output was lost."""
    command = f"{sys.executable} -c '{RUN % run_continues}' {redirection}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shell = ["bash", "-o", "pipefail", "-c", command]
    ran = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr, (folder / "ended").read_text()


LOST = "hybrid launch: stdout: {}; output is lost, the run continues\n"


@pytest.mark.parametrize(
    ("run_continues", "redirection", "message"),
    [
        (True, "", ""),
        (True, "| head -n 1", LOST.format("Broken pipe")),
        (True, ">/dev/full", LOST.format("No space left on device")),
        (True, ">&-", LOST.format("Bad file descriptor")),
        (True, ">/dev/full 2>/dev/full", None),
        (True, "2>&-", None),
        (True, "2>&1 | head -n 1", None),
        (False, "| head -n 1", ""),
        (False, ">/dev/full", "hybrid launch: stdout: No space left on device; output is lost\n"),
    ],
)
def test_output_may_close(run_continues: bool, redirection: str, message: str | None, tmp_path: Path) -> None:
    """A command that only prints ends silently if its reader ends."""
    stderr, is_lost = ended(tmp_path, redirection, run_continues)
    assert stderr == ("" if message is None else f"{message}a word\n")
    assert is_lost == str(bool(redirection))

"""What a person sees: a live region on a terminal, plain lines without escape codes elsewhere."""

import dataclasses
import io
import math
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.style import Style
from support.commands import ROOT

from hybrid.checkpoint.checkpoint_manifest import Best
from hybrid.config import RunConfig
from hybrid.config.task_sections import shown_metrics
from hybrid.metrics import BinaryMetrics
from hybrid.protocol.update_rules import Staleness
from workers.console.terminal import (
    COMMAND_STYLE,
    DONE_STYLE,
    ProfileSummary,
    Summary,
    TerminalView,
    TrainingProgress,
    passing_status,
)

PROGRESS = TrainingProgress(
    step=1200,
    total_steps=5860,
    epoch=1,
    epochs=2,
    loss=0.45321,
    score_name="auc",
    score=0.77123,
    samples_per_second=31234.5,
    seconds_left=3723.4,
    phase_seconds={"data": 0.0, "lookup": 1.0, "dense": 1.0, "backward": 2.0, "update": 0.0},
)
ALL_METRICS = BinaryMetrics(0.7712, 0.4532, 0.8123, 1.01, 0.8, 0.25, 1000).as_dict()
METRICS = {name: ALL_METRICS[name] for name in shown_metrics(RunConfig().all_tasks)}
SUMMARY = Summary(
    metrics=METRICS,
    step=5860,
    best=None,
    best_auc=0.8012,
    samples_per_second=30123.4,
    run_folder=Path("runs") / ("a-very-long-name-" * 8),
    curves=Path("runs/x/curves.png"),
    resume="hybrid train --resume runs/x",
    evaluate="hybrid evaluate runs/x",
    predict="hybrid predict runs/x",
)


def _plain() -> tuple[TerminalView, io.StringIO]:
    file = io.StringIO()
    return TerminalView(Console(file=file, force_terminal=False, width=80)), file


def _line(**changes: Any) -> str:
    """A log step, where there is no terminal."""
    view, file = _plain()
    view.progress(dataclasses.replace(PROGRESS, **changes))
    return file.getvalue()


def _summary(**changes: Any) -> list[str]:
    """The end of a run, where there is no terminal."""
    view, file = _plain()
    with view:
        view.summary(dataclasses.replace(SUMMARY, **changes))
    return file.getvalue().splitlines()


def _terminal(width: int = 100, **variables: str) -> tuple[TerminalView, io.StringIO]:
    file = io.StringIO()
    environment = {"TERM": "xterm-256color", **variables}
    return TerminalView(Console(file=file, force_terminal=True, width=width, _environ=environment)), file


def _screen(written: str) -> list[str]:
    """The lines a terminal would show, from the few escape codes that rich's live region uses."""
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
    return lines


def test_plain_lines() -> None:
    view, file = _plain()
    with view:
        view.status("waiting for 2 trainers")
        view.progress(PROGRESS)
        view.evaluation(1200, METRICS)
    assert file.getvalue().splitlines() == [
        "waiting for 2 trainers",
        "step 1200/5860  epoch 1/2  loss 0.4532  AUC 0.7712  31,234 samples/s  left 1:02:03"
        "  data 0% lookup 25% dense 25% backward 50% update 0%",
        "test at step 1,200  AUC 0.7712  log loss 0.4532  normalized entropy 0.8123  calibration 1.0100",
    ]


def test_plain_summary() -> None:
    assert _summary() == [
        "",
        "test AUC            0.7712 at step 5,860 (best reachable 0.8012)",
        "log loss            0.4532",
        "normalized entropy  0.8123",
        "calibration         1.0100",
        "throughput          30,123 samples/s",
        f"run folder          {SUMMARY.run_folder}",
        "curves              runs/x/curves.png",
        f"checkpoint          {SUMMARY.run_folder}/checkpoints/step-00005860",
        "resume              hybrid train --resume runs/x",
        "evaluate            hybrid evaluate runs/x",
        "predict             hybrid predict runs/x",
    ]


@pytest.mark.parametrize(
    ("best", "line"),
    [
        (Best("auc", 0.78123, 1200), "best AUC            0.7812 at step 1,200"),
        (Best("log_loss", 0.45, 1200), "best log loss       0.4500 at step 1,200"),
    ],
)
def test_a_summary_names_the_best_checkpoint_where_it_is_not_the_last(best: Best, line: str) -> None:
    said = _summary(run_folder=Path("runs/x"), best=best)
    assert said[1:7] == [
        "test AUC            0.7712 at step 5,860 (best reachable 0.8012)",
        "log loss            0.4532",
        "normalized entropy  0.8123",
        "calibration         1.0100",
        line,
        "throughput          30,123 samples/s",
    ]
    assert said[9:11] == [
        "last checkpoint     runs/x/checkpoints/step-00005860 (resume starts here)",
        "best checkpoint     runs/x/checkpoints/step-00001200 (evaluate and predict use it)",
    ]


def test_a_summary_names_one_checkpoint_where_the_last_is_the_best() -> None:
    assert _summary(best=Best("auc", 0.7712, 5860)) == _summary()


def test_a_profile_says_where_it_is_and_what_takes_most_of_a_step() -> None:
    profile = ProfileSummary(Path("runs/x/profile"), 0.01234, {"backward": 0.5, "wait": 0.251})
    assert [line for line in _summary(profile=profile) if line not in _summary()] == [
        "profile             runs/x/profile",
        "a recorded step     12.3 ms: backward 50%, wait 25%",
    ]


def test_an_unknown_best_auc_is_not_mentioned() -> None:
    assert "test AUC            0.7712 at step 5,860" in _summary(best_auc=None)


def test_unknown_numbers_say_so() -> None:
    said = _line(score=math.nan, seconds_left=math.nan, phase_seconds={"data": 0.0})
    assert "  AUC unknown  31,234 samples/s  left unknown  data 0%\n" in said


def test_staleness_is_shown_where_there_is_any() -> None:
    stale = Staleness(8, 10, 3)
    assert "left 1:02:03  staleness 1.25 (at most 3)  data" in _line(staleness=stale)
    view, file = _terminal()
    with view:
        view.progress(dataclasses.replace(PROGRESS, staleness=stale))
        assert "staleness 1.25 (at most 3)" in _screen(file.getvalue())[1]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00")]
)
def test_time_left(seconds: float, text: str) -> None:
    assert f"left {text} " in _line(seconds_left=seconds)


def test_the_live_region_shows_the_latest_step_below_the_evaluations() -> None:
    view, file = _terminal()
    with view:
        view.status("waiting for 2 trainers")
        assert _screen(file.getvalue())[-1] == "waiting for 2 trainers"
        view.progress(dataclasses.replace(PROGRESS, step=10, loss=0.9))
        view.evaluation(10, METRICS)
        view.progress(PROGRESS)
        view.status("saving a checkpoint")
        evaluation, bar, numbers, phases, status = _screen(file.getvalue())
    assert evaluation.startswith("test at step 10  AUC 0.7712")
    assert re.fullmatch(r"epoch 1/2 ━{14}[━╸╺]{59} step 1,200/5,860", bar)
    assert numbers.rstrip() == "loss 0.4532   AUC 0.7712   samples/s 31,234   left 1:02:03"
    assert phases.rstrip() == "data 0%   lookup 25%   dense 25%   backward 50%   update 0%"
    assert status == "saving a checkpoint"


def test_the_live_region_is_gone_at_the_end_and_the_cursor_is_back() -> None:
    view, file = _terminal()
    with view:
        view.progress(PROGRESS)
        view.summary(SUMMARY)
    shown = [line for line in _screen(file.getvalue()) if line.strip()]
    assert shown[0].startswith("test AUC")
    assert len(shown) == 11
    assert file.getvalue().rfind("\x1b[?25h") > file.getvalue().rfind("\x1b[?25l")


def _fail_after_a_step(view: TerminalView) -> None:
    view.progress(PROGRESS)
    raise KeyError


def test_an_error_brings_the_cursor_back() -> None:
    view, file = _terminal()
    with pytest.raises(KeyError), view:
        _fail_after_a_step(view)
    assert file.getvalue().rfind("\x1b[?25h") > file.getvalue().rfind("\x1b[?25l")
    assert not any(line.strip() for line in _screen(file.getvalue()))


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}], ids=["colours", "no colours"])
@pytest.mark.parametrize("width", [30, 60, 80])
def test_a_narrow_terminal_cuts_no_word(width: int, variables: dict[str, str]) -> None:
    view, file = _terminal(width, **variables)
    status = "preparing " + "/a-long-folder" * 4
    with view:
        view.progress(dataclasses.replace(PROGRESS, staleness=Staleness(8, 10, 3)))
        view.status(status)
        view.evaluation(1200, METRICS)
        view.note("  a line that is said and stays, of words, longer than some terminals")
        lines = [line.rstrip() for line in _screen(file.getvalue())]
    assert max(map(len, lines)) <= width
    said = " ".join(" ".join(lines).split())
    for part in ("step 1,200/5,860", "samples/s 31,234", "staleness 1.25 (at most 3)", "backward 50%"):
        assert any(part in line for line in lines), part
    assert "a line that is said and stays, of words, longer than some terminals" in said
    assert "normalized entropy 0.8123 calibration 1.0100" in said
    assert status.replace(" ", "") in "".join(lines).replace(" ", "")


def test_a_narrow_summary_can_be_copied() -> None:
    view, file = _terminal(60)
    resume = ".venv/bin/hybrid launch --resume runs/run-20261122-102340 --set train.epochs=2"
    view.summary(dataclasses.replace(SUMMARY, resume=resume, run_folder=Path("r")))
    lines = _screen(file.getvalue())
    assert max(map(len, lines)) <= 60
    first = next(index for index, line in enumerate(lines) if line.startswith("resume"))
    last = next(index for index, line in enumerate(lines) if line.startswith("evaluate"))
    command = "\n".join(line[20:].rstrip() for line in lines[first:last])
    assert shlex.split(command.replace("\\\n", "")) == resume.split()
    assert last - first > 1


def test_a_dumb_terminal_gets_plain_lines() -> None:
    view, file = _terminal(TERM="dumb")
    with view:
        view.progress(PROGRESS)
    assert "\x1b" not in file.getvalue()
    assert "lookup 25%" in file.getvalue()


@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_a_passing_status_is_for_a_person_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    file = io.StringIO()
    monkeypatch.setattr(file, "isatty", lambda: kind == "terminal")
    monkeypatch.setattr(sys, "stderr", file)
    with passing_status() as say:
        say("reading the model")
        assert ("reading the model" in file.getvalue()) == (kind == "terminal")
    assert not any(line.strip() for line in _screen(file.getvalue()))


@pytest.mark.parametrize("style", [DONE_STYLE, COMMAND_STYLE])
def test_colours_stand_out_from_black_and_from_white(style: str) -> None:
    """By the contrast of WCAG 2.1, which asks for 3 of what is no small text."""
    channels = [value / 255 for value in Style.parse(style).color.get_truecolor()]  # type: ignore[union-attr]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    assert min((1 + 0.05) / (luminance + 0.05), (luminance + 0.05) / 0.05) > 3


def test_no_thread_draws() -> None:
    before = threading.active_count()
    view, _ = _terminal()
    with view:
        view.progress(PROGRESS)
        assert threading.active_count() == before


def test_a_pipe_gets_no_escape_codes_even_where_colour_is_forced() -> None:
    code = (
        "import sys\nfrom workers.console.terminal import TerminalView\n"
        "with TerminalView() as view: view.status('[bold]starting')\nsys.exit('torch' in sys.modules)"
    )
    command, forced = [sys.executable, "-c", code], {"FORCE_COLOR": "1", "TERM": "xterm"}
    run = subprocess.run(command, cwd=ROOT, env=forced, capture_output=True, check=True)
    assert run.stdout == b"[bold]starting\n"

"""Requests to stop a run: what is saved and printed, and how the run is resumed."""

import os
import re
import signal
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pexpect
import psutil
import pytest
from pexpect.fdpexpect import fdspawn
from support.commands import (
    COMMAND_SECONDS,
    HYBRID,
    ONE_EACH,
    ROOT,
    TRAINER,
    WORKER,
    Command,
    Ended,
    by_hand,
    eventually,
    fresh_secret,
    output_of,
    settings,
    start_process,
    started,
)
from support.forked_commands import ForkedCommand

from hybrid.checkpoint.checkpoint_folders import list_checkpoints, parse_step

STOP_SECONDS = 10.0
CTRL_C = "\x03"
RUN = settings(run={"folder": "run"})
CUSTOM_NET = """
import time
from itertools import count
from pathlib import Path
from hybrid.dense.net_builder import build_dense_net

def block():
    Path("blocked").touch()
    time.sleep(60)

def build(config, input_spec, widths):
    net = build_dense_net(config.replace(dense=type(config.dense)()), input_spec, widths)
    steps = count(1)

    def block_after_three(bottom, inputs):
        if bottom.training and next(steps) > 3:
            block()

    net.bottom.register_forward_pre_hook(block_after_three)
    return net

def build_never(config, input_spec, widths):
    block()
"""


def check_saved(ended: Ended, folder: Path, command: str, code: int) -> int:
    """Check that a run was saved and ended with ``code``; return the saved step."""
    step = parse_step(list_checkpoints(folder)[0])
    pattern = rf"hybrid {command}: .*step {step} is saved.* {command} --resume run\n"
    assert ended.code == code
    assert re.fullmatch(pattern, ended.stderr), ended.stderr
    assert f"\nsaving step {step}; " in ended.stdout
    assert not (folder / "result.json").exists()
    assert "stopped without a result" in (folder / "report.html").read_text()
    return step


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGINT, signal.SIGHUP)),
    ],
    ids=lambda number: number.name,
)
def test_signal_saves_and_stops_the_run(number: signal.Signals, endless: list[str], tmp_path: Path) -> None:
    """Schedulers send SIGTERM to all processes at once."""
    with started(["launch", *endless, *ONE_EACH, *RUN], tmp_path) as command:
        command.await_step()
        others = [each for each in command.processes() if each.pid != command.process.pid]
        for each in others if number is signal.SIGTERM else []:
            each.send_signal(number)
        command.process.send_signal(number)
        ended = command.wait(STOP_SECONDS)
    step = check_saved(ended, tmp_path / "run", "launch", 128 + number)
    if number is signal.SIGTERM:
        more = ["--set", f"train.max_steps={step + 1}"]
        printed = output_of(["launch", "--resume", "run", *more], tmp_path)
        assert f"\nresuming from step {step}: run/checkpoints/step-{step:08}\n" in printed


@pytest.mark.parametrize(
    ("number", "receivers", "code"),
    [
        pytest.param(signal.SIGTERM, ["master"], 143, marks=pytest.mark.long),
        (signal.SIGTERM, ["worker 0"], 143),
        pytest.param(signal.SIGTERM, ["worker 0", "trainer 0", "master"], 143, marks=pytest.mark.long),
        pytest.param(signal.SIGUSR1, ["master", "trainer 0", "worker 0"], 75, marks=pytest.mark.long),
        pytest.param(signal.SIGINT, ["trainer 0"], 143, marks=pytest.mark.long),
    ],
    ids=["master", "worker", "all", "warning to all", "trainer"],
)
def test_signal_to_any_role_by_hand_saves_and_stops_the_run(
    number: signal.Signals, receivers: list[str], code: int, endless: list[str], tmp_path: Path
) -> None:
    with by_hand([["master", *RUN], TRAINER, WORKER], [*endless, *ONE_EACH], tmp_path) as commands:
        commands[0].await_step()
        by_name = dict(zip(("master", "trainer 0", "worker 0"), commands, strict=True))
        for name in receivers:
            by_name[name].process.send_signal(number)
        check_saved(commands[0].wait(STOP_SECONDS), tmp_path / "run", "master", code)
        endings = [each.wait(STOP_SECONDS) for each in commands[1:]]
        assert [(ended.code, ended.stderr) for ended in endings] == [(code, "")] * 2


@contextmanager
def blocked(arguments: list[str], function: str, folder: Path) -> Iterator[Command]:
    """Start a command whose trainer blocks in ``function`` of a custom net."""
    (folder / "custom.py").write_text(CUSTOM_NET)
    net = settings(dense={"net": f"custom:{function}"})
    with started([*arguments, *ONE_EACH, *net], folder) as command:
        assert eventually((folder / "blocked").exists), command.stderr
        yield command


@pytest.mark.parametrize("then", ["again", pytest.param("too long", marks=pytest.mark.long), "killed"])
def test_stop_while_a_step_does_not_end(then: str, endless: list[str], tmp_path: Path) -> None:
    timeout = settings(cluster={"timeout_seconds": 5})
    with blocked(["launch", *endless, *RUN, *timeout], "build", tmp_path) as command:
        command.process.send_signal(signal.SIGINT)
        assert eventually(lambda: "\nstopping after step 4; " in command.stdout, STOP_SECONDS)
        if then == "again":
            command.process.send_signal(signal.SIGINT)
        elif then == "killed":
            command.role("worker 0").kill()
        ended = command.wait(STOP_SECONDS)
    code, reason = {
        "again": (130, "stopped"),
        "too long": (130, r"stopped: .* 5 s \(cluster.timeout_seconds\)"),
        "killed": (75, r"worker 0 \(pid \d+\) was killed by SIGKILL; .*"),
    }[then]
    assert ended.code == code
    assert re.fullmatch(rf"hybrid launch: {reason}; .*steps 0 to 2 are lost\n", ended.stderr), ended.stderr


@pytest.mark.parametrize(
    ("command", "number", "line"),
    [("launch", signal.SIGINT, "stopped; nothing is saved"), ("compare", signal.SIGTERM, "interrupted")],
)
def test_stop_before_the_first_step_is_immediate(
    command: str, number: signal.Signals, line: str, tiny: list[str], tmp_path: Path
) -> None:
    arguments = [command, *tiny, *(RUN if command == "launch" else [])]
    with blocked(arguments, "build_never", tmp_path) as running:
        running.process.send_signal(number)
        ended = running.wait(STOP_SECONDS)
    assert (ended.code, ended.stderr) == (128 + number, f"hybrid {command}: {line}\n")
    assert not (tmp_path / "run/config.toml").exists()


@contextmanager
def on_a_terminal(arguments: list[str], folder: Path, *, afresh: bool) -> Iterator[tuple[Any, Command]]:
    """Start ``launch`` on its own terminal, as :func:`started` does; yield the terminal and the command."""
    words = ["launch", *arguments, *ONE_EACH, *RUN]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 160))
    name, unused = os.ttyname(theirs), folder.with_name(f"{folder.name}-output")
    for suffix in (".out", ".err"):
        unused.with_suffix(suffix).touch()
    process: Any
    if afresh:
        # Children of a script's background processes ignore Ctrl-C, and those of nohup a hangup.
        shell = ["env", "--default-signal=INT,HUP", "sh", "-c", f'exec "$@" <{name} >{name} 2>&1', "sh"]
        process = start_process([*shell, *HYBRID, *words], variables, unused, folder)
    else:
        process = ForkedCommand(words, folder, variables, Path(name))
    command = Command(process, unused)
    try:
        assert eventually(lambda: len(command.processes()) > 1)
        os.close(theirs)
        # An echoed ^C may split a character.
        yield fdspawn(ours, encoding="utf-8", codec_errors="replace", timeout=COMMAND_SECONDS), command
    finally:
        command.kill()


@pytest.mark.parametrize(
    "times", [0, 1, pytest.param(2, marks=pytest.mark.long)], ids=["at the start", "once", "twice"]
)
def test_ctrl_c_on_a_terminal(times: int, endless: list[str], tmp_path: Path) -> None:
    """It restores the screen. The secret is in no argument, variable or other file of the run."""
    secret_file = tmp_path / "secret"
    unsaved = [*endless, "--set", "checkpoint.keep_best=none", *fresh_secret(tmp_path)]
    secret = secret_file.read_text().strip()
    with on_a_terminal(unsaved, tmp_path, afresh=not times) as (terminal, command):
        if times:
            terminal.expect("step [0-9]{2}/")
            assert len(command.processes()) >= 4
        for process in command.processes():
            with suppress(psutil.NoSuchProcess):  # it has ended
                assert secret not in " ".join([*process.cmdline(), *process.environ().values()])
        if times == 2:
            command.role("worker 0").suspend()
        terminal.send(CTRL_C)
        if times:
            terminal.expect("(stopping after|saving) step [0-9]+; a second Ctrl-C")
        if times == 2:
            terminal.send(CTRL_C)
        terminal.expect(pexpect.EOF, timeout=STOP_SECONDS)
        shown = terminal.before
        assert command.wait().code == 130
        terminal.close()
        assert shown.rindex("\x1b[?25h") > shown.rfind("\x1b[?25l")
        # The message is on a line of its own: the line of the cursor was cleared.
        found = re.search(r"\r\x1b\[2K\x1b\[\?25hhybrid launch: stopped; (.*)\r\n$", shown)
        assert found, shown
        assert found[1].startswith("step " if times == 1 else "nothing is saved")
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != secret_file]
    assert bool(written) == bool(times)
    assert not [path for path in written if secret.encode() in path.read_bytes()]


@pytest.mark.long
def test_closed_terminal_saves_and_stops_the_run(endless: list[str], tmp_path: Path) -> None:
    with on_a_terminal(endless, tmp_path, afresh=True) as (terminal, command):
        terminal.expect("step [0-9]{2}/")
        terminal.close()
        assert command.wait(STOP_SECONDS).code == 129
    assert list_checkpoints(tmp_path / "run")

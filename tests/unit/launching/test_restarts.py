"""Which failures are followed by another start, when it ends, and what the user is told."""

import errno
import json
import os
from pathlib import Path

import pytest

from hybrid.errors import ClusterError
from workers.exit_codes import Cause
from workers.launching.restarts import FILE_NAME, Restarts
from workers.launching.role_failure import RoleFailure
from workers.run_folder.run_paths import command_name
from workers.run_folder.run_state import RunState, describe_saved_state

KILLED = RoleFailure("worker 0 was killed", Cause.KILLED)


def log_steps(run: Path, last: int) -> None:
    """Log steps 1 to ``last`` anew, as a start of the run does that goes on."""
    lines = [{"kind": "train", "step": step} for step in range(1, last + 1)]
    path = run / "metrics.jsonl"
    path.unlink(missing_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"kind": "tra')


def write_checkpoint(run: Path, step: int, suffix: str = "") -> None:
    folder = run / f"checkpoints/step-{step:08d}{suffix}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


@pytest.fixture
def restarts(tmp_path: Path) -> Restarts:
    return Restarts(tmp_path, 3)


def told(restarts: Restarts, failure: RoleFailure = KILLED) -> str:
    """What is said of a restart, after the failure."""
    line = restarts.after(failure)
    assert line.startswith(f"{failure.message}; ")
    return line.removeprefix(f"{failure.message}; ")


def test_steps_after_the_newest_checkpoint_are_lost(restarts: Restarts, tmp_path: Path) -> None:
    log_steps(tmp_path, 5)
    assert told(restarts) == "steps 0 to 4 are lost, starting from the beginning"
    log_steps(tmp_path, 8)
    write_checkpoint(tmp_path, 6)
    write_checkpoint(tmp_path, 8, suffix=".partial")
    assert told(restarts) == "steps 6 to 7 are lost, resuming from step 6"


def test_nothing_is_lost_where_no_step_was_taken_since(restarts: Restarts, tmp_path: Path) -> None:
    assert told(restarts) == "nothing is lost, starting from the beginning"
    log_steps(tmp_path, 5)
    write_checkpoint(tmp_path, 5)
    assert told(restarts) == "nothing is lost, resuming from step 5"


def test_steps_are_not_lost_twice(restarts: Restarts, tmp_path: Path) -> None:
    log_steps(tmp_path, 5)
    write_checkpoint(tmp_path, 4)
    assert told(restarts) == "steps 4 to 4 are lost, resuming from step 4"
    # Killed before its first step, the next start has left the log as it was.
    assert told(restarts) == "nothing is lost, resuming from step 4"


def test_it_gives_up_with_the_first_cause_of_those_without_a_new_checkpoint(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, 2)
    restarts.after(KILLED)
    write_checkpoint(tmp_path, 4)
    first = RoleFailure("worker 1 was killed", Cause.KILLED)
    restarts.after(first)
    restarts.after(RoleFailure("trainer 0 was killed", Cause.KILLED))
    with pytest.raises(ClusterError) as given_up:
        restarts.after(RoleFailure("trainer 1 was killed", Cause.KILLED))
    rest = "stopped after 2 restart(s) without a new checkpoint (cluster.max_restarts)"
    assert str(given_up.value) == f"worker 1 was killed; {rest}"


def test_without_restarts_the_cause_is_all_there_is_to_say(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"^worker 0 was killed$"):
        Restarts(tmp_path, 0).after(KILLED)
    assert not list(tmp_path.iterdir())


def test_what_would_come_again_ends_the_run(restarts: Restarts, tmp_path: Path) -> None:
    log_steps(tmp_path, 5)
    with pytest.raises(ClusterError, match=r"^a bad row$"):
        restarts.after(RoleFailure("a bad row", Cause.REFUSED))


@pytest.mark.parametrize("cause", [Cause.LOST, Cause.SILENT, Cause.ECHO])
def test_what_may_not_come_again_is_followed_by_another_start(cause: Cause, restarts: Restarts) -> None:
    assert told(restarts, RoleFailure("it failed", cause)).startswith("nothing is lost")


def test_an_exception_ends_the_run_only_before_its_first_step(restarts: Restarts, tmp_path: Path) -> None:
    error = RoleFailure("trainer 0: KeyError: 'x'", Cause.EXCEPTION)
    with pytest.raises(ClusterError, match=r"^trainer 0: KeyError: 'x'$"):
        restarts.after(error)
    log_steps(tmp_path, 5)
    assert told(restarts, error) == "steps 0 to 4 are lost, starting from the beginning"
    with pytest.raises(ClusterError):
        restarts.after(error)  # the start before left no step of its own


def test_a_resumed_run_has_not_finished_until_it_says_so_anew(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    restarts = Restarts(tmp_path, 3)
    assert not restarts.is_finished()
    (tmp_path / "result.json").unlink()
    assert not restarts.is_finished()
    (tmp_path / "result.json").write_text('{"auc": 1}')
    assert restarts.is_finished()


def test_a_restart_that_finds_no_room_on_the_record_is_said_with_its_cause(
    restarts: Restarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr("workers.run_folder.append_only_file.os.write", refuse)
        line = told(restarts)
    rule = "cannot be written: No space left on device; free space there, or set run.folder to another folder"
    assert line == f"nothing is lost, starting from the beginning; {tmp_path / FILE_NAME}: {rule}"
    restarts.after(KILLED)
    assert len((tmp_path / FILE_NAME).read_text().splitlines()) == 1


def test_what_a_stopped_run_leaves_and_how_it_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    again = f"to resume: {command_name()} launch --resume '{run}'"
    assert describe_saved_state(run, "launch") == "nothing is saved"
    run.mkdir()
    log_steps(run, 5)
    assert describe_saved_state(run, "launch") == "nothing is saved; steps 0 to 4 are lost"
    write_checkpoint(run, 4)
    assert describe_saved_state(run, "launch") == f"step 4 is saved; steps 4 to 4 are lost; {again}"
    write_checkpoint(run, 6)
    assert describe_saved_state(run, "launch") == f"step 6 is saved; {again}"


def test_restarts_are_on_record(restarts: Restarts, tmp_path: Path) -> None:
    log_steps(tmp_path, 5)
    write_checkpoint(tmp_path, 4)
    restarts.after(KILLED)
    restarts.after(RoleFailure("frozen", Cause.LOST))
    lines = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert all(line.pop("time") > 0 for line in lines)
    assert lines == [
        {"cause": "killed", "message": "worker 0 was killed", "step": 5, "resumed_step": 4},
        {"cause": "lost", "message": "frozen", "step": 4, "resumed_step": 4},
    ]


def test_memory_that_runs_out_before_the_first_step_would_run_out_again(
    restarts: Restarts, tmp_path: Path
) -> None:
    starved = RoleFailure(
        "master (pid 7) was killed by SIGKILL, probably since memory ran out", Cause.STARVED
    )
    with pytest.raises(ClusterError, match=r"^master .* memory ran out; a restart would run out of memory"):
        restarts.after(starved)
    log_steps(tmp_path, 5)
    assert told(restarts, starved) == "steps 0 to 4 are lost, starting from the beginning"


def test_the_line_of_an_earlier_checkpoint_does_not_set_a_run_back(tmp_path: Path) -> None:
    """It is written in the background, and logged once it is there."""
    records = [{"kind": "train", "step": 15}, {"kind": "checkpoint", "step": 10}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    assert RunState.of(tmp_path).logged_step == 15

"""Exit codes: what may help to try again, and what would fail the same way."""

import signal

import pytest

from hybrid import transport
from hybrid.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    HybridError,
    OutageError,
    StorageError,
)
from hybrid.topology import Role, RoleKind
from workers.exit_codes import Cause, ExitCode, Interrupt, ReportedError, StopMessage, code_of, exit_code
from workers.rendezvous.interrupt import EndedRoleError, LostRoleError, StoppedError
from workers.roles.master import UnexpectedError

WORKER = Role(RoleKind.WORKER)


def remote(kind: str) -> transport.RemoteError:
    return transport.RemoteError(WORKER, transport.Failure("it fails", kind, True, "there", False))


def come_of(error: HybridError, cause: Exception) -> HybridError:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "before_a_step", "later"),
    [
        (ConfigError("train.epochs", "is bad"), 1, 1),
        (DataError("no such file"), 1, 1),
        (CheckpointError("of another model"), 1, 1),
        (remote("ConfigError"), 1, 1),
        (StorageError("no permission"), 1, 1),
        (CheckpointError("no permission"), 1, 1),
        (come_of(CheckpointError("not written"), StorageError("no permission")), 1, 1),
        (come_of(CheckpointError("not written"), KeyError("x")), 1, 1),
        (OutageError("down"), 75, 75),
        (come_of(CheckpointError("not written"), OutageError("down")), 75, 75),
        (come_of(ConfigError("--resume", "cannot be read"), OutageError("down")), 75, 75),
        (come_of(CheckpointError("not written"), remote("OutageError")), 75, 75),
        (remote("OutageError"), 75, 75),
        (KeyError("x"), 1, 75),
        (MemoryError(), 1, 75),
        (remote("KeyError"), 1, 75),
        (UnexpectedError(remote("KeyError"), "at step 3"), 1, 75),
        (ClusterError("missing after 60 s"), 75, 75),
        (transport.LostError(WORKER, "no answer"), 75, 75),
        (LostRoleError("worker 0 is frozen"), 75, 75),
        (remote("ClusterError"), 75, 75),
        (StoppedError("stopped by the master: lost worker 0"), 75, 75),
        (StoppedError("stopped by the master: a.b: is bad", ExitCode.FAILED), 1, 1),
        (EndedRoleError("worker 0 has ended: a.b: is bad", ExitCode.FAILED), 1, 1),
        (ReportedError("the run is over", ExitCode.DONE), 0, 0),
        (KeyboardInterrupt(), 130, 130),
        (Interrupt(ExitCode.TERMINATED), 143, 143),
    ],
    ids=repr,
)
def test_an_error_ends_a_process_with(error: BaseException, before_a_step: int, later: int) -> None:
    assert (exit_code(error, has_stepped=False), exit_code(error)) == (before_a_step, later)


@pytest.mark.parametrize(
    ("cause", "before_a_step", "later"),
    [
        (Cause.KILLED, 75, 75),
        (Cause.STARVED, 1, 75),
        (Cause.SILENT, 75, 75),
        (Cause.REFUSED, 1, 1),
        (Cause.OUTAGE, 75, 75),
    ],
)
def test_what_a_launcher_sees_ends_it_with(cause: Cause, before_a_step: int, later: int) -> None:
    assert (code_of(cause, has_stepped=False), code_of(cause, has_stepped=True)) == (before_a_step, later)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 75)],
)
def test_a_signal_ends_it_with(number: signal.Signals, code: int) -> None:
    """A warning means that there is to be another start."""
    assert ExitCode.of_signal(number) == code


@pytest.mark.parametrize(
    "word", [StopMessage(), StopMessage(ExitCode.AGAIN, "lost worker 0: a 1 b"), StopMessage(ExitCode.AGAIN)]
)
def test_a_word_arrives_as_it_was_said(word: StopMessage) -> None:
    assert StopMessage.parse(str(word)) == word

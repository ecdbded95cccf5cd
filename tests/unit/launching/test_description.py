"""What a role tells of the error that ends it."""

import pytest

from hybrid import errors, transport
from hybrid.topology import MASTER, Role, RoleKind
from workers.exit_codes import Cause
from workers.launching.error_report import describe
from workers.rendezvous.interrupt import EndedRoleError, LostRoleError, StoppedError
from workers.roles.diagnosis import UnexpectedError

WORKER = Role(RoleKind.WORKER, 0)


def remote(kind: str, is_users: bool) -> transport.RemoteError:
    return transport.RemoteError(WORKER, transport.Failure("bad", kind, is_users, "host", not is_users))


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (errors.ConfigError("train.epochs", "is bad"), Cause.REFUSED),
        (errors.CheckpointError("altered"), Cause.REFUSED),
        (remote("DataError", True), Cause.REFUSED),
        (remote("NonFiniteError", True), Cause.REFUSED),
        (remote("ClusterError", True), Cause.LOST),
        (remote("KeyError", False), Cause.EXCEPTION),
        (UnexpectedError(remote("KeyError", False), "at step 3"), Cause.EXCEPTION),
        (errors.ClusterError("missing after 60 s"), Cause.LOST),
        (transport.LostError(WORKER, "no answer"), Cause.LOST),
        (LostRoleError("worker 0 is frozen"), Cause.LOST),
        (StoppedError("stopped by the master"), Cause.ECHO),
        (EndedRoleError("worker 0 has ended: KeyError"), Cause.ECHO),
        (KeyError("x"), Cause.EXCEPTION),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.value,
)
def test_a_role_tells_what_kind_of_error_ends_it(error: Exception, cause: Cause) -> None:
    assert describe(MASTER, error).cause is cause


def test_a_role_tells_its_error_in_one_line() -> None:
    assert describe(MASTER, KeyError("x")).message == "master: KeyError: 'x'"
    assert describe(MASTER, errors.DataError("one\n  two")).message == "one two"


@pytest.mark.parametrize(
    ("error", "role"),
    [
        (remote("KeyError", False), WORKER),
        (UnexpectedError(remote("KeyError", False), "at step 3"), WORKER),
        (remote("ConfigError", True), None),
        (errors.ConfigError("train.epochs", "is bad"), None),
        (KeyError("x"), MASTER),
    ],
)
def test_it_says_whose_log_has_the_stack(error: Exception, role: Role | None) -> None:
    assert describe(MASTER, error).logged_by == role

"""What a role tells the launcher of the error that ends it."""

from hybrid import transport
from hybrid.errors import HybridError
from hybrid.topology import Role
from hybrid.user_code.tracebacks import describe_error, needs_traceback
from workers.exit_codes import cause_of
from workers.launching.role_outcome import Outcome
from workers.roles.diagnosis import UnexpectedError


def describe(role: Role, error: Exception) -> Outcome:
    """What ``role`` tells the launcher of the error that ends it."""
    message = str(error) if isinstance(error, HybridError) else f"{role}: {describe_error(error)}"
    return Outcome(" ".join(message.split()), cause_of(error), _logged_by(role, error))


def _logged_by(role: Role, error: Exception) -> Role | None:
    """The role whose log has the stack of ``error``, where the line that tells it is not all of it."""
    if isinstance(error, UnexpectedError):
        error = error.error
    if isinstance(error, transport.RemoteError):
        return error.role if error.failure.is_logged else None
    return role if needs_traceback(error) else None

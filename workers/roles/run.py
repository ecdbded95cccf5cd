"""Being a trainer or a worker in this process, whoever started it."""

from collections.abc import Sequence

from hybrid.topology import Role
from hybrid.trust.secret import Secret
from workers.endings import ExitCode
from workers.joining.address import Address
from workers.joining.bootstrap import await_stop, join


def serve(role: Role, address: Address, secret: Secret, settings: Sequence[str] = ()) -> ExitCode:
    """Host what the master creates here, until it says stop, and with which code; see :func:`join`."""
    with join(role, address, secret, settings) as cluster:
        return await_stop(cluster)

"""A trainer or a worker in this process."""

from collections.abc import Sequence

from hybrid.security.secret import Secret
from hybrid.topology import Role
from workers.exit_codes import ExitCode
from workers.rendezvous.bootstrap import await_stop, join
from workers.rendezvous.master_address import MasterAddress


def serve(role: Role, address: MasterAddress, secret: Secret, settings: Sequence[str] = ()) -> ExitCode:
    """Serve the master's calls until it stops this role; return the exit code. See :func:`join`."""
    with join(role, address, secret, settings) as cluster:
        return await_stop(cluster)

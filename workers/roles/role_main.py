"""Being a trainer or a worker in this process, whoever started it."""

from collections.abc import Sequence

from hybrid.security.secret import Secret
from hybrid.topology import Role
from workers.exit_codes import ExitCode
from workers.rendezvous.bootstrap import await_stop, join
from workers.rendezvous.master_address import MasterAddress


def serve(role: Role, address: MasterAddress, secret: Secret, settings: Sequence[str] = ()) -> ExitCode:
    """Host what the master creates here, until it says stop, and with which code; see :func:`join`."""
    with join(role, address, secret, settings) as cluster:
        return await_stop(cluster)

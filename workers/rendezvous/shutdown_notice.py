"""A master whose run has come to its end tells so every role that was started again. Free of torch."""

import socket

from hybrid.config import RunConfig
from hybrid.security.secret import Secret
from workers.rendezvous.address import DEFAULT_PORT
from workers.rendezvous.heartbeat_interval import Rhythm
from workers.rendezvous.listener import listen
from workers.rendezvous.registration import Admission, Welcome
from workers.rendezvous.rendezvous_server import Rendezvous


def dismiss(config: RunConfig, secret: Secret, why: str) -> None:
    """Have the roles of a cluster end in peace, as they come; returns once all have.

    One that has not come within ``cluster.start_timeout_seconds`` was not started again.

    Args:
        why: what they are told.

    Raises:
        ConfigError: this host does not have the master's address, or its port is in use.
    """
    section = config.cluster
    admission = Admission(section.topology, Welcome("", socket.gethostname(), "", ""), lambda _: None, why)
    rhythm = Rhythm(section.heartbeat_timeout_seconds)
    with listen(section.master_address, section.master_port or DEFAULT_PORT) as listener:
        with Rendezvous(listener, secret, admission, rhythm, lambda _: None) as rendezvous:
            rendezvous.await_claims(section.start_timeout_seconds)

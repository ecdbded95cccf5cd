"""Both ends of a carrier's connection in one process."""

import socket

from hybrid.topology import Role, RoleKind, Topology
from hybrid.trust.secret import Secret
from hybrid.wire.carrier.frames import Frames, Kind
from hybrid.wire.carrier.meeting import Connection, Place

SECRET = Secret.fresh()
ONE_OF_EACH = Topology(1, 1)
TRAINER, WORKER = Role(RoleKind.TRAINER), Role(RoleKind.WORKER)


def place(
    role: Role,
    topology: Topology = ONE_OF_EACH,
    secret: Secret = SECRET,
    run_id: bytes = b"run",
    timeout_seconds: float = 10.0,
) -> Place:
    """A role's place in a run, the same run unless told otherwise."""
    return Place(role, topology, secret, run_id, timeout_seconds)


def frames() -> tuple[Frames, Frames]:
    """A trainer's and a worker's, of one connection."""
    there, back = place(TRAINER).directions(WORKER, b"random")
    answering, hearing = place(WORKER).directions(TRAINER, b"random")
    return Frames(there, back, Kind.ANSWER, Kind.FAILED), Frames(answering, hearing, Kind.CALL)


def connection() -> tuple[Connection, Connection]:
    """A trainer's end and a worker's."""
    sockets = socket.socketpair()
    for each in sockets:
        each.setblocking(False)
    trainers, workers = frames()
    return Connection(sockets[0], trainers), Connection(sockets[1], workers)

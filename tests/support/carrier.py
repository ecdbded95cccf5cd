"""Both ends of a carrier's connection in one process."""

import socket

from hybrid.security.secret import Secret
from hybrid.topology import Role, RoleKind, Topology
from hybrid.transport.socket.frames import Frames, Kind
from hybrid.transport.socket.handshake import Connection, Place
from hybrid.transport.socket.lent_blocks import BorrowedMemory, HostMemory, LentMemory

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


def shared() -> tuple[HostMemory, HostMemory]:
    """Memory as both ends of a connection have it."""
    lent = LentMemory(), LentMemory()
    borrowed = [BorrowedMemory(each.descriptor) for each in lent]
    for each in lent:
        each.close()
    return HostMemory(lent[0], borrowed[1]), HostMemory(lent[1], borrowed[0])


def frames(is_one_host: bool = False) -> tuple[Frames, Frames]:
    """A trainer's and a worker's, of one connection."""
    there, back = place(TRAINER).directions(WORKER, b"random")
    answering, hearing = place(WORKER).directions(TRAINER, b"random")
    ours, theirs = shared() if is_one_host else (None, None)
    return (
        Frames(there, back, Kind.ANSWER, Kind.FAILED, memory=ours),
        Frames(answering, hearing, Kind.CALL, memory=theirs),
    )


def connection(is_one_host: bool = False) -> tuple[Connection, Connection]:
    """A trainer's end and a worker's."""
    sockets = socket.socketpair()
    for each in sockets:
        each.setblocking(False)
    trainers, workers = frames(is_one_host)
    return Connection(sockets[0], trainers), Connection(sockets[1], workers)

"""RPC of one process with itself, and both ends of a connection of the socket transport."""

import mmap
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from hybrid import transport
from hybrid.security.secret import Secret
from hybrid.shared_memory.tensor_blocks import MemoryPair
from hybrid.topology import MASTER, Role, RoleKind, Topology
from hybrid.transport.socket.frames import FrameKind, Frames
from hybrid.transport.socket.handshake import Connection, Identity

SECRET = Secret.fresh()
ONE_OF_EACH = Topology(1, 1)
TRAINER, WORKER = Role(RoleKind.TRAINER), Role(RoleKind.WORKER)


def identity(role: Role, topology: Topology = ONE_OF_EACH, timeout_seconds: float = 10.0) -> Identity:
    """Return a role of a run, always the same run."""
    return Identity(role, topology, SECRET, b"run", timeout_seconds)


def shared(num_bytes: int = MemoryPair.NUM_BYTES) -> tuple[MemoryPair, MemoryPair]:
    """Return the memory of the trainer's end and of the worker's end of a connection."""
    memory = memoryview(mmap.mmap(-1, num_bytes))
    return MemoryPair(memory, True), MemoryPair(memory, False)


def frames(is_one_host: bool = False) -> tuple[Frames, Frames]:
    """Return the frames of a trainer and of a worker, for one connection."""
    there, back = identity(TRAINER).directions(WORKER, b"random")
    answering, hearing = identity(WORKER).directions(TRAINER, b"random")
    ours, theirs = shared() if is_one_host else (None, None)
    return (
        Frames(there, back, FrameKind.RESPONSE, FrameKind.FAILURE, memory=ours),
        Frames(answering, hearing, FrameKind.CALL, memory=theirs),
    )


def connection(is_one_host: bool = False) -> tuple[Connection, Connection]:
    """Return the trainer's end and the worker's end of a connection."""
    sockets = socket.socketpair()
    for each in sockets:
        each.setblocking(False)
    trainers, workers = frames(is_one_host)
    return Connection(sockets[0], trainers), Connection(sockets[1], workers)


@contextmanager
def rpc_of_one(store: dist.Store, stop_seconds: float = 10.0) -> Iterator[None]:
    """This process, in an RPC group of one, without shared memory, which a thread would poll all the time."""
    with mock.patch("hybrid.transport.stubs.polls_shared_memory", return_value=False):
        transport.start(
            MASTER,
            Topology(0, 0),
            store,
            secret=Secret.fresh(),
            run_id=b"run",
            interface="lo",
            timeout_seconds=5.0,
        )
    try:
        yield
    finally:
        transport.stop(stop_seconds)

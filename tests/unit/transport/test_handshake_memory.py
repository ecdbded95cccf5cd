"""What a worker requires of a trainer on its host: a proof, and memory with it."""

import json
import os
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest
import torch
import torch.distributed as dist
from support.socket_ends import TRAINER, WORKER, identity

from hybrid.transport.shared_memory import lent_blocks
from hybrid.transport.shared_memory.lent_blocks import create_memory
from hybrid.transport.socket import handshake
from hybrid.transport.socket.frames import FrameKind, Message
from hybrid.transport.socket.handshake import Connection, WorkerAddress, accept_trainers, connect_to_worker

SECONDS = 10.0
HELLO_BYTES = 36
NONCE_BYTES = 16


class LocalWorker:
    """One that waits for its trainer."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        store = dist.HashStore()
        self.met: Future[list[Connection]] = pool.submit(accept_trainers, identity(WORKER), store, "lo")
        self.address = WorkerAddress(*json.loads(store.get(WORKER.rpc_name)))

    def let_in(self) -> tuple[Connection, Connection]:
        """The trainer, at last: its end, and the worker's."""
        return connect_to_worker(identity(TRAINER), WORKER, self.address), self.met.result(SECONDS)[0]


@pytest.fixture
def local_worker() -> Iterator[LocalWorker]:
    with ThreadPoolExecutor() as pool:
        yield LocalWorker(pool)


def close_all(*connections: Connection) -> None:
    for each in connections:
        each.frames.close()
        each.socket.close()


def test_both_ends_have_memory_and_no_descriptor_is_left() -> None:
    before = psutil.Process().num_fds()
    with ThreadPoolExecutor() as pool:
        ends = LocalWorker(pool).let_in()
    tensor = torch.rand(lent_blocks.LEAST_BYTES)
    for sender, receiver in (ends, ends[::-1]):
        kind = FrameKind.CALL if sender is ends[0] else FrameKind.RESPONSE
        frame = sender.frames.seal(Message(kind, 1, None, [tensor]))
        assert len(frame) < tensor.nbytes
        sender.socket.send(frame)
        assert receiver.frames.receive(receiver.socket)
        message = receiver.frames.next()
        assert message is not None
        assert torch.equal(message.tensors[0], tensor)
    del message
    close_all(*ends)
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("num_bytes", [0, 4096], ids=["nothing", "too little"])
def test_a_trainer_without_valid_memory_is_rejected(local_worker: LocalWorker, num_bytes: int) -> None:
    with local_worker.address.connect() as connection, closing_descriptor(num_bytes) as memory:
        nonce, random = connection.recv(NONCE_BYTES, socket.MSG_WAITALL), os.urandom(NONCE_BYTES)
        sending, _ = identity(TRAINER).directions(WORKER, nonce + random)
        hello = struct.pack("<I", TRAINER.index) + random + sending.seal(b"")
        socket.send_fds(connection, [hello], [memory] if num_bytes else [])
        assert connection.recv(1) == b""
    assert not local_worker.met.done()
    close_all(*local_worker.let_in())


@contextmanager
def closing_descriptor(num_bytes: int) -> Iterator[int]:
    """The descriptor of new memory."""
    descriptor = create_memory(num_bytes)
    yield descriptor
    os.close(descriptor)


def test_descriptors_of_unauthenticated_peers_are_closed(local_worker: LocalWorker) -> None:
    opened = set()
    for _ in range(5):
        with local_worker.address.connect() as connection, open(os.devnull) as file:
            socket.send_fds(connection, [os.urandom(HELLO_BYTES)], [file.fileno()])
            while connection.recv(100):
                pass
        opened.add(psutil.Process().num_fds())
    assert len(opened) == 1
    assert not local_worker.met.done()
    close_all(*local_worker.let_in())


def test_another_user_is_rejected(local_worker: LocalWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(handshake, "is_same_user", lambda _: False)
        with pytest.raises(ConnectionError):
            connect_to_worker(identity(TRAINER), WORKER, local_worker.address)
    close_all(*local_worker.let_in())


def test_own_host_differs_by_user(monkeypatch: pytest.MonkeyPatch) -> None:
    own = lent_blocks.own_host()
    assert own == lent_blocks.own_host()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert own != lent_blocks.own_host()

"""What a worker requires of a trainer on its host: a proof, and memory with it."""

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest
import torch
import torch.distributed as dist
from support.socket_ends import TRAINER, WORKER, identity

from hybrid.errors import ClusterError
from hybrid.transport.shared_memory import lent_blocks
from hybrid.transport.socket import handshake
from hybrid.transport.socket.frames import FrameKind, Message
from hybrid.transport.socket.handshake import Connection, WorkerAddress, accept_trainers, connect_to_worker

SECONDS = 10.0
HELLO_BYTES = 36


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


@pytest.mark.parametrize("lent", ["nothing", "too little"])
def test_who_lends_no_memory_is_not_let_in(
    local_worker: LocalWorker, lent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        if lent == "nothing":
            patched.setattr(handshake, "_send", _send_alone)
        else:
            patched.setattr(lent_blocks.LentMemory, "__init__", _lend_little)
        with pytest.raises((OSError, ClusterError)):
            connect_to_worker(identity(TRAINER), WORKER, local_worker.address)
        assert not local_worker.met.done()
    close_all(*local_worker.let_in())


_send = handshake._send


def _send_alone(connection: socket.socket, said: bytes, lent: lent_blocks.LentMemory | None) -> None:
    """What a trainer says, whose words are longer; the worker is of this process, too."""
    _send(connection, said, lent if len(said) < HELLO_BYTES else None)


def _lend_little(memory: lent_blocks.LentMemory) -> None:
    memory.descriptor = os.memfd_create("little")
    os.ftruncate(memory.descriptor, 4096)


def test_what_a_stranger_has_sent_is_closed(local_worker: LocalWorker) -> None:
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


def test_another_user_is_not_let_in(local_worker: LocalWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(handshake, "is_same_user", lambda _: False)
        with pytest.raises(ConnectionError):
            connect_to_worker(identity(TRAINER), WORKER, local_worker.address)
    close_all(*local_worker.let_in())


def test_hosts_are_told_apart_by_user_too(monkeypatch: pytest.MonkeyPatch) -> None:
    own = lent_blocks.own_host()
    assert own == lent_blocks.own_host()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert own != lent_blocks.own_host()

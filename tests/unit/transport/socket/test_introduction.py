"""What a worker asks of those who connect within its host: a proof, and memory with it."""

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest
import torch
import torch.distributed as dist
from support.carrier import TRAINER, WORKER, place

from hybrid.errors import ClusterError
from hybrid.transport.socket import connection_setup, handshake, lent_blocks
from hybrid.transport.socket.connection_setup import meet_trainers
from hybrid.transport.socket.frames import Kind, Message
from hybrid.transport.socket.handshake import Address, Connection, introduce

SECONDS = 10.0
HELLO_BYTES = 36


class Worker:
    """One that waits for its trainer."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        store = dist.HashStore()
        self.met: Future[list[Connection]] = pool.submit(meet_trainers, place(WORKER), store, "lo")
        self.address = Address(*json.loads(store.get(WORKER.rpc_name)))

    def let_in(self) -> tuple[Connection, Connection]:
        """The trainer, at last: its end, and the worker's."""
        return introduce(place(TRAINER), WORKER, self.address), self.met.result(SECONDS)[0]


@pytest.fixture
def worker() -> Iterator[Worker]:
    with ThreadPoolExecutor() as pool:
        yield Worker(pool)


def close(*connections: Connection) -> None:
    for each in connections:
        each.frames.close()
        each.socket.close()


def test_both_ends_have_memory_and_no_descriptor_is_left() -> None:
    before = psutil.Process().num_fds()
    with ThreadPoolExecutor() as pool:
        ends = Worker(pool).let_in()
    tensor = torch.rand(lent_blocks.LEAST_BYTES)
    for sender, receiver in (ends, ends[::-1]):
        kind = Kind.CALL if sender is ends[0] else Kind.ANSWER
        frame = sender.frames.seal(Message(kind, 1, None, [tensor]))
        assert len(frame) < tensor.nbytes
        sender.socket.send(frame)
        assert receiver.frames.receive(receiver.socket)
        message = receiver.frames.next()
        assert message is not None
        assert torch.equal(message.tensors[0], tensor)
    del message
    close(*ends)
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("lent", ["nothing", "too little"])
def test_who_lends_no_memory_is_not_let_in(
    worker: Worker, lent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        if lent == "nothing":
            patched.setattr(handshake, "_say", _say_alone)
        else:
            patched.setattr(lent_blocks.LentMemory, "__init__", _lend_little)
        with pytest.raises((OSError, ClusterError)):
            introduce(place(TRAINER), WORKER, worker.address)
        assert not worker.met.done()
    close(*worker.let_in())


_say = handshake._say


def _say_alone(connection: socket.socket, said: bytes, lent: lent_blocks.LentMemory | None) -> None:
    """What a trainer says, whose words are longer; the worker is of this process, too."""
    _say(connection, said, lent if len(said) < HELLO_BYTES else None)


def _lend_little(memory: lent_blocks.LentMemory) -> None:
    memory.descriptor = os.memfd_create("little")
    os.ftruncate(memory.descriptor, 4096)


def test_what_a_stranger_has_sent_is_closed(worker: Worker) -> None:
    opened = set()
    for _ in range(5):
        with worker.address.connect() as connection, open(os.devnull) as file:
            socket.send_fds(connection, [os.urandom(HELLO_BYTES)], [file.fileno()])
            while connection.recv(100):
                pass
        opened.add(psutil.Process().num_fds())
    assert len(opened) == 1
    assert not worker.met.done()
    close(*worker.let_in())


def test_another_user_is_not_let_in(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(connection_setup, "is_same_user", lambda _: False)
        with pytest.raises(OSError, match="closed"):
            introduce(place(TRAINER), WORKER, worker.address)
    close(*worker.let_in())


def test_hosts_are_told_apart_by_user_too(monkeypatch: pytest.MonkeyPatch) -> None:
    own = lent_blocks.own_host()
    assert own == lent_blocks.own_host()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert own != lent_blocks.own_host()

"""Connections between trainers and workers, and the peers that a worker rejects."""

import dataclasses
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from support.socket_ends import identity

from hybrid.errors import ClusterError
from hybrid.security.secret import Secret
from hybrid.shared_memory.tensor_blocks import MIN_BLOCK_BYTES, create_memory, host_id
from hybrid.topology import Role, RoleKind, Topology
from hybrid.transport.socket import handshake
from hybrid.transport.socket.frames import FrameKind, Message
from hybrid.transport.socket.handshake import (
    Connection,
    Identity,
    WorkerAddress,
    accept_trainers,
    connect_to_workers,
)

SECONDS = 10.0
HELLO_BYTES = 36
NONCE_BYTES = 16
TRAINERS = Role(RoleKind.TRAINER, 0), Role(RoleKind.TRAINER, 1)
WORKER = Role(RoleKind.WORKER)
TOPOLOGY = Topology(2, 1)


def trainer(index: int, **changes: Any) -> Identity:
    return dataclasses.replace(identity(TRAINERS[index], TOPOLOGY), **changes)


@pytest.fixture(params=["one host", "two hosts"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> socket.AddressFamily:
    """The address family by which trainers of this process reach workers."""
    if request.param == "one host":
        return socket.AF_UNIX
    monkeypatch.setattr(handshake, "host_id", lambda: os.urandom(8).hex())  # each on a host of its own
    return socket.AF_INET


class Worker:
    """Worker 0, which waits for its trainers."""

    def __init__(self, stack: ExitStack, seconds: float = SECONDS) -> None:
        self.store = dist.HashStore()
        self._stack = stack
        pool = stack.enter_context(ThreadPoolExecutor())
        own = identity(WORKER, TOPOLOGY, timeout_seconds=seconds)
        self.connections: Future[list[Connection]] = pool.submit(accept_trainers, own, self.store, "lo")
        self.address = WorkerAddress(*json.loads(self.store.get(WORKER.rpc_name)))
        stack.callback(self._close)

    def _close(self) -> None:
        with suppress(ClusterError):
            close(*self.connections.result(SECONDS))

    def connect(self, own: Identity, store: dist.Store | None = None) -> Connection:
        (connection,) = connect_to_workers(own, store or self.store).values()
        self._stack.callback(close, connection)
        return connection

    def check_missing_trainers_connect(self, *indices: int) -> None:
        assert not self.connections.done()
        for index in indices:
            self.connect(trainer(index))
        assert len(self.connections.result(SECONDS)) == 2


@pytest.fixture
def worker() -> Iterator[Worker]:
    with ExitStack() as stack:
        yield Worker(stack)


def close(*connections: Connection) -> None:
    for each in connections:
        each.frames.close()
        each.socket.close()


def open_connection(address: WorkerAddress) -> socket.socket:
    """Connect, once the worker's backlog has room."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return address.connect()
        except BlockingIOError:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def response_to(address: WorkerAddress, message: bytes) -> bytes:
    """Return what a worker sends after its nonce."""
    with open_connection(address) as connection:
        response = b""
        with suppress(ConnectionResetError):
            assert len(connection.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
        connection.sendall(message)
        with suppress(ConnectionResetError):
            while more := connection.recv(100):
                response += more
    return response


def test_every_trainer_connects_to_the_worker(worker: Worker, family: socket.AddressFamily) -> None:
    """Within a host, large tensors lie in memory of both, and no other descriptor of it is left."""
    tensor, num_files = torch.rand(MIN_BLOCK_BYTES), psutil.Process().num_fds()
    ends = worker.connect(trainer(1)), worker.connect(trainer(0))
    for index, ours in zip((1, 0), ends, strict=True):
        theirs = worker.connections.result(SECONDS)[index]
        for sender, receiver, kind in ((ours, theirs, FrameKind.CALL), (theirs, ours, FrameKind.RESPONSE)):
            frame = sender.frames.seal(Message(kind, 1, None, [tensor]))
            assert (len(frame) < tensor.nbytes) == (family == socket.AF_UNIX)
            for each in (sender, receiver):
                each.socket.setblocking(True)
            sender.socket.sendall(frame)
            while (message := receiver.frames.next()) is None:
                assert receiver.frames.receive(receiver.socket)
            assert torch.equal(message.tensors[0], tensor)
            assert receiver.socket.family == family
        del message
    num_kept = 8 if family == socket.AF_UNIX else 4  # sockets, and the maps of memory
    assert psutil.Process().num_fds() - num_files == num_kept - 3, "listeners and their selector are closed"
    listening = [c.laddr.port for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    assert worker.address.port not in listening


def test_unauthenticated_peers_are_rejected_and_trainers_connect(
    worker: Worker, family: socket.AddressFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "MAX_UNAUTHENTICATED", 20)
    with ExitStack() as stack:
        silent = [stack.enter_context(open_connection(worker.address)) for _ in range(50)]
        silent[0].settimeout(SECONDS)
        assert len(silent[0].recv(100)) == NONCE_BYTES
        assert silent[0].recv(100) == b"", "the first is displaced by later ones"
        for message in (os.urandom(HELLO_BYTES), bytes(HELLO_BYTES), b"GET / HTTP/1.0\r\n\r\n" * 3):
            assert response_to(worker.address, message) == b""
        for changes in ({"secret": Secret.fresh()}, {"run_id": b"another"}):
            with pytest.raises(ClusterError, match=r"worker 0 at .*closed"):
                worker.connect(trainer(0, timeout_seconds=0.2, **changes))
        worker.check_missing_trainers_connect(0, 1)


def test_a_recorded_hello_is_rejected(worker: Worker, family: socket.AddressFamily) -> None:
    """It is valid neither again nor for another trainer; and a trainer is accepted once."""
    sent: list[bytes] = []

    class Recorded(socket.socket):
        def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
            sent.append(data)
            super().sendall(data, flags)

        def sendmsg(self, buffers: list[bytes], *rest: Any) -> int:  # type: ignore[override]
            sent.append(b"".join(buffers))
            return super().sendmsg(buffers, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(socket, "socket", Recorded)
        worker.connect(trainer(0))
    (hello,) = [each for each in sent if len(each) == HELLO_BYTES]
    assert response_to(worker.address, hello) == b""
    assert response_to(worker.address, b"\1" + hello[1:]) == b""
    with pytest.raises(ClusterError, match="closed"):
        worker.connect(trainer(0, timeout_seconds=0.2))
    worker.check_missing_trainers_connect(1)


def test_a_recorded_hello_whose_original_never_arrives_is_rejected(worker: Worker) -> None:
    """An attacker between a trainer and a worker delays the trainer, and sends its hello first."""
    intercepted = dist.HashStore()
    by_tcp = worker.address._replace(host="another host")
    with ThreadPoolExecutor() as pool, socket.create_server(("127.0.0.1", 0)) as proxy:
        intercepted.set("worker0", json.dumps(["another host", "", *proxy.getsockname()]))
        delayed = pool.submit(worker.connect, trainer(0, timeout_seconds=0.1), intercepted)
        accepted, _ = proxy.accept()
        proxy.close()
        with accepted, open_connection(by_tcp) as forwarded:
            accepted.sendall(forwarded.recv(NONCE_BYTES, socket.MSG_WAITALL))
            hello = accepted.recv(HELLO_BYTES, socket.MSG_WAITALL)
        assert response_to(by_tcp, hello) == b""
        with pytest.raises(ClusterError, match=r"trainer 0 .* worker 0"):
            delayed.result(SECONDS)
    worker.check_missing_trainers_connect(0, 1)


@pytest.mark.parametrize("num_bytes", [0, 4096], ids=["no memory", "short memory"])
def test_a_trainer_without_valid_memory_is_rejected(worker: Worker, num_bytes: int) -> None:
    with worker.address.connect() as connection, os.fdopen(create_memory(num_bytes), "rb") as memory:
        nonce, random = connection.recv(NONCE_BYTES, socket.MSG_WAITALL), os.urandom(NONCE_BYTES)
        sending, _ = trainer(0).directions(WORKER, nonce + random)
        hello = struct.pack("<I", 0) + random + sending.seal(b"")
        socket.send_fds(connection, [hello], [memory.fileno()] if num_bytes else [])
        assert connection.recv(1) == b""
    worker.check_missing_trainers_connect(0, 1)


def test_descriptors_of_unauthenticated_peers_are_closed(worker: Worker) -> None:
    num_files = set()
    for _ in range(5):
        with worker.address.connect() as connection, open(os.devnull) as file:
            socket.send_fds(connection, [os.urandom(HELLO_BYTES)], [file.fileno()])
            while connection.recv(100):
                pass
        num_files.add(psutil.Process().num_fds())
    assert len(num_files) == 1
    worker.check_missing_trainers_connect(0, 1)


def test_a_worker_of_another_run_is_rejected() -> None:
    """A trainer demands a proof, too."""
    store = dist.HashStore()
    with ThreadPoolExecutor() as pool, socket.create_server(("127.0.0.1", 0)) as impostor:
        store.set("worker0", json.dumps(["another host", "", *impostor.getsockname()]))

        def respond() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(os.urandom(NONCE_BYTES))
                connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
                connection.sendall(os.urandom(16))

        responding = pool.submit(respond)
        with pytest.raises(ClusterError, match=r"127\.0\.0\.1:\d+ .*worker 0"):
            connect_to_workers(trainer(0), store)
        responding.result(SECONDS)


def test_missing_roles_are_named() -> None:
    with ExitStack() as stack:
        worker = Worker(stack, seconds=0.5)
        worker.connect(trainer(1))
        with pytest.raises(ClusterError, match=r"worker 0 .*: trainer 0$"):
            worker.connections.result(SECONDS)
        gone = worker.address._replace(host="another host")
        worker.store.set("worker0", json.dumps(gone))
        with pytest.raises(ClusterError, match=f"^trainer 1 .* worker 0 at .*:{gone.port}: .*refused"):
            worker.connect(trainer(1, timeout_seconds=0.2))


def test_an_interface_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth9": []})
    with pytest.raises(ClusterError, match="eth9"):
        accept_trainers(identity(WORKER, TOPOLOGY), dist.HashStore(), "eth9")


def test_host_id_differs_by_user(monkeypatch: pytest.MonkeyPatch) -> None:
    own = host_id()
    assert own == host_id()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert own != host_id()

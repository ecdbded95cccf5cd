"""How trainers and workers find each other, and who is not let in."""

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from support.socket_ends import identity

from hybrid.errors import ClusterError
from hybrid.security.secret import Secret
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

TOPOLOGY = Topology(2, 2)
SECONDS = 10.0
HELLO_BYTES = 36
NONCE_BYTES = 16


def trainer(index: int, secret: Secret | None = None, run_id: bytes = b"run") -> Identity:
    own = identity(Role(RoleKind.TRAINER, index), TOPOLOGY, run_id=run_id)
    return dataclasses.replace(own, secret=secret) if secret else own


def worker(index: int) -> Identity:
    return identity(Role(RoleKind.WORKER, index), TOPOLOGY)


@pytest.fixture(params=["one host", "two hosts"], autouse=True)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> socket.AddressFamily:
    """How trainers of this process reach workers of it."""
    if request.param == "one host":
        return socket.AF_UNIX
    monkeypatch.setattr(handshake, "own_host", lambda: os.urandom(8).hex())  # each on one of its own
    return socket.AF_INET


@contextmanager
def listening(
    store: dist.Store, pool: ThreadPoolExecutor, own: Identity
) -> Iterator[tuple[WorkerAddress, Future[list[Connection]]]]:
    """A worker that waits for its trainers: where, and whom it will have met."""
    met = pool.submit(accept_trainers, own, store, "lo")
    yield WorkerAddress(*json.loads(store.get(own.role.rpc_name))), met
    for each in met.result(SECONDS):
        each.socket.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def close(*met: dict[Role, Connection]) -> None:
    for each in met:
        for connection in each.values():
            connection.socket.close()


def test_every_trainer_connects_to_every_worker(
    pool: ThreadPoolExecutor, family: socket.AddressFamily
) -> None:
    store = dist.HashStore()
    at_workers = [pool.submit(accept_trainers, worker(i), store, "lo") for i in range(2)]
    at_trainers = [pool.submit(connect_to_workers, trainer(i), store).result(SECONDS) for i in (1, 0)]
    for index, of_trainer in zip((1, 0), at_trainers, strict=True):
        assert list(of_trainer) == list(TOPOLOGY.workers)
        for each, mine in of_trainer.items():
            theirs = at_workers[each.index].result(SECONDS)[index]
            mine.socket.send(mine.frames.seal(Message(FrameKind.CALL, 1, f"from {index}")))
            theirs.socket.setblocking(True)
            assert theirs.frames.receive(theirs.socket)
            assert theirs.frames.next() == (FrameKind.CALL, 1, f"from {index}", [])
            assert mine.socket.family == theirs.socket.family == family
    listeners = [c for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    for future in at_workers:
        assert all(each.laddr.port != json.loads(store.get("worker0"))[3] for each in listeners)
        close({Role(RoleKind.TRAINER, i): met for i, met in enumerate(future.result(SECONDS))})
    close(*at_trainers)


def test_unauthenticated_peers_are_rejected_and_trainers_connect(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "MAX_UNAUTHENTICATED", 20)
    store = dist.HashStore()
    with listening(store, pool, worker(0)) as (address, met), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(address)) for _ in range(50)]
        silent[0].settimeout(SECONDS)
        assert len(silent[0].recv(100)) == NONCE_BYTES
        assert silent[0].recv(100) == b"", "the first gives way to those after it"
        for said in (os.urandom(HELLO_BYTES), bytes(HELLO_BYTES), b"GET / HTTP/1.0\r\n\r\n" * 3):
            assert answer_to(address, said) == b""
        for wrong in (trainer(0, Secret.fresh()), trainer(0, run_id=b"another")):
            with pytest.raises(
                ClusterError, match=r"cannot reach worker 0 at .*: it has closed the connection"
            ):
                connect_to_workers(
                    dataclasses.replace(wrong, topology=Topology(2, 1), timeout_seconds=0.2), store
                )
        assert not met.done()
        for index in (0, 1):
            stack.callback(close, connect_to_workers(only_worker_0(trainer(index)), store))
        assert len(met.result(SECONDS)) == 2


def only_worker_0(own: Identity) -> Identity:
    return dataclasses.replace(own, topology=Topology(own.topology.num_trainers, 1))


def connected(address: WorkerAddress) -> socket.socket:
    """A connection, once the worker has a place for one more."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return address.connect()
        except BlockingIOError:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def answer_to(address: WorkerAddress, said: bytes) -> bytes:
    """What a worker answers to this."""
    with connected(address) as connection:
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            assert len(connection.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
        connection.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            while more := connection.recv(100):
                answer += more
    return answer


def test_a_recorded_hello_is_rejected(pool: ThreadPoolExecutor) -> None:
    """Neither again, nor by another trainer."""
    store = dist.HashStore()
    heard: list[bytes] = []

    class Heard(socket.socket):
        def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
            heard.append(data)
            super().sendall(data, flags)

        def sendmsg(self, buffers: list[bytes], *rest: Any) -> int:  # type: ignore[override]
            heard.append(b"".join(buffers))
            return super().sendmsg(buffers, *rest)

    with listening(store, pool, worker(0)) as (address, met), contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(socket, "socket", Heard)
            stack.callback(close, connect_to_workers(only_worker_0(trainer(0)), store))
        (hello,) = [said for said in heard if len(said) == HELLO_BYTES]  # the worker's words are heard too
        assert answer_to(address, hello) == b""
        assert answer_to(address, b"\1" + hello[1:]) == b""
        assert not met.done()
        stack.callback(close, connect_to_workers(only_worker_0(trainer(1)), store))


def test_a_recorded_hello_whose_original_never_arrives_is_rejected(pool: ThreadPoolExecutor) -> None:
    """An attacker between a trainer and a worker delays the trainer, and sends its hello first."""
    store, intercepted = dist.HashStore(), dist.HashStore()
    own = only_worker_0(trainer(0))
    with listening(store, pool, worker(0)) as (address, met), contextlib.ExitStack() as stack:
        by_tcp = address._replace(host="another host")
        with socket.create_server(("127.0.0.1", 0)) as proxy:
            intercepted.set("worker0", json.dumps(["another host", "", *proxy.getsockname()]))
            delayed = pool.submit(
                connect_to_workers, dataclasses.replace(own, timeout_seconds=0.1), intercepted
            )
            taken, _ = proxy.accept()
            with taken, connected(by_tcp) as forwarded:
                taken.sendall(forwarded.recv(NONCE_BYTES, socket.MSG_WAITALL))
                hello = taken.recv(HELLO_BYTES, socket.MSG_WAITALL)
        assert answer_to(by_tcp, hello) == b""
        with pytest.raises(ClusterError, match="trainer 0 cannot reach worker 0"):
            delayed.result(SECONDS)
        for each in (own, only_worker_0(trainer(1))):
            stack.callback(close, connect_to_workers(each, store))
        assert len(met.result(SECONDS)) == 2


def test_a_trainer_is_accepted_once(pool: ThreadPoolExecutor) -> None:
    store = dist.HashStore()
    with listening(store, pool, worker(0)) as (_, met), contextlib.ExitStack() as stack:
        stack.callback(close, connect_to_workers(only_worker_0(trainer(0)), store))
        with pytest.raises(ClusterError, match=r"it has closed the connection"):
            connect_to_workers(dataclasses.replace(only_worker_0(trainer(0)), timeout_seconds=0.2), store)
        assert not met.done()
        stack.callback(close, connect_to_workers(only_worker_0(trainer(1)), store))


def test_trainers_connect_among_many_unauthenticated_peers(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "MAX_UNAUTHENTICATED", 20)
    store, is_over = dist.HashStore(), threading.Event()

    def crowd(address: WorkerAddress) -> None:
        while not is_over.is_set():
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                for _ in range(40):
                    stack.enter_context(address.connect())

    with listening(store, pool, worker(0)) as (address, met), contextlib.ExitStack() as stack:
        crowds = [pool.submit(crowd, address) for _ in range(2)]
        for index in (0, 1):
            stack.callback(close, connect_to_workers(only_worker_0(trainer(index)), store))
        is_over.set()
        assert len(met.result(SECONDS)) == 2
        for each in crowds:
            each.result(SECONDS)


def test_a_worker_of_another_run_is_rejected(pool: ThreadPoolExecutor) -> None:
    """What listens could be anything: the trainer asks for a proof, too."""
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        store.set("worker0", json.dumps(["another host", "", *impostor.getsockname()]))

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(os.urandom(NONCE_BYTES))
                connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
                connection.sendall(os.urandom(16))

        answering = pool.submit(answer)
        with pytest.raises(ClusterError, match=r"what listens at 127.0.0.1:\d+ is not worker 0 of this run"):
            connect_to_workers(only_worker_0(trainer(0)), store)
        answering.result(SECONDS)


def test_a_missing_trainer_is_named(pool: ThreadPoolExecutor) -> None:
    store = dist.HashStore()
    late = dataclasses.replace(worker(0), timeout_seconds=0.5)
    waiting = pool.submit(accept_trainers, late, store, "lo")
    met = connect_to_workers(only_worker_0(trainer(1)), store)
    with pytest.raises(ClusterError, match=r"^not connected to worker 0 in time: trainer 0$"):
        waiting.result(SECONDS)
    close(met)


def test_a_worker_that_cannot_be_reached_is_named() -> None:
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    store.set("worker0", json.dumps(["another host", "", "127.0.0.1", port]))
    own = dataclasses.replace(only_worker_0(trainer(1)), timeout_seconds=0.2)
    said = rf"^trainer 1 cannot reach worker 0 at 127.0.0.1:{port}: .*refused"
    with pytest.raises(ClusterError, match=said):
        connect_to_workers(own, store)


def test_an_interface_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth9": []})
    with pytest.raises(ClusterError, match="eth9 has no address"):
        accept_trainers(worker(0), dist.HashStore(), "eth9")

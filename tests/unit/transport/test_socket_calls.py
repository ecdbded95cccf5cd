"""Calls by sockets, from a trainer's client to a worker's server and back."""

import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from support.commands import eventually
from support.socket_ends import WORKER, connection
from torch import Tensor
from torch.futures import Future

from hybrid.errors import ClusterError, ConfigError, parse_exception
from hybrid.primitives.pending_result import PendingResult
from hybrid.transport.pending_calls import LostError, PendingTensors
from hybrid.transport.socket.frames import FrameKind, Frames, Message
from hybrid.transport.socket.handshake import Connection
from hybrid.transport.socket.socket_calls import Reply, SocketClient, SocketServer

SECONDS = 10.0
LARGE = 1 << 20  # values: more bytes than a connection holds

deferred: dict[int, Future[list[Tensor]]] = {}


def complete(*tensors: Tensor) -> Future[list[Tensor]]:
    future: Future[list[Tensor]] = Future()
    future.set_result(list(tensors))
    return future


def double(number: int, tensors: Sequence[Tensor]) -> Future[list[Tensor]]:
    return complete(torch.tensor(2 * number), *tensors)


def defer(number: int, _: Sequence[Tensor]) -> Future[list[Tensor]]:
    deferred[number] = Future()
    return deferred[number]


def fail(*_: object) -> Future[list[Tensor]]:
    raise ConfigError("dense.net", "is wrong", "mlp")


def large(*_: object) -> Future[list[Tensor]]:
    return complete(torch.arange(LARGE))


def on_device(*_: object) -> Future[list[Tensor]]:
    return complete(torch.ones(1, device="meta"))


FUNCTIONS = (double, defer, fail, large, on_device)


@pytest.fixture(params=[False, True], ids=["two hosts", "one host"], autouse=True)
def is_one_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether both ends of every connection are on one host."""
    monkeypatch.setattr(sys.modules[__name__], "connection", partial(connection, request.param))


@contextmanager
def connected_clients(trainers: int = 1) -> Iterator[list[SocketClient]]:
    ends = [connection() for _ in range(trainers)]
    clients = [SocketClient(ours, SECONDS) for ours, _ in ends]
    servers = [SocketServer(theirs, FUNCTIONS) for _, theirs in ends]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()
        for server in servers:
            server.close(SECONDS)


@pytest.fixture
def client() -> Iterator[SocketClient]:
    with connected_clients() as (client,):
        yield client


@pytest.fixture
def ends() -> Iterator[tuple[SocketClient, Connection]]:
    """A client, and the other end of its connection."""
    ours, theirs = connection()
    client = SocketClient(ours, SECONDS)
    yield client, theirs
    client.close()
    theirs.socket.close()


def wait(reply: PendingResult[Any]) -> Any:
    """Wait as a stub does."""
    return PendingTensors[Any](WORKER, reply).wait()


def doubled(client: SocketClient, number: int) -> int:
    return int(client.call(double, number).wait()[0])


def test_responses_arrive_in_any_order(client: SocketClient) -> None:
    first, second = client.call(defer, 1), client.call(defer, 2)
    completed: list[Any] = []
    first.add_done_callback(completed.append)
    assert doubled(client, 3) == 6
    assert not first.done()
    deferred.pop(2).set_result([torch.zeros(1)])
    assert second.wait()[0].tolist() == [0]
    assert not completed
    deferred.pop(1).set_result([torch.ones(2)])
    assert eventually(first.done, SECONDS)
    assert completed == [first]
    first.add_done_callback(completed.append)
    assert completed == [first, first]
    assert first.wait()[0].tolist() == [1, 1]


def test_a_callback_added_while_the_reply_completes_is_called(client: SocketClient) -> None:
    class Racing(Reply):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "is_done" and threading.current_thread() is threading.main_thread():
                futures.wait([pool.submit(self.complete, ())], timeout=0.05)
            return value

    completed: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        Racing(client).add_done_callback(completed.append)
    assert len(completed) == 1


@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_remote_exception_keeps_its_message(is_deferred: bool, client: SocketClient) -> None:
    reply = client.call(defer if is_deferred else fail, 1)
    if is_deferred:
        assert eventually(lambda: 1 in deferred, SECONDS)
        error: Any = ConfigError("dense.net", "is wrong", "mlp")  # torch's annotation is wrong
        deferred.pop(1).set_exception(error)
    with pytest.raises(RuntimeError) as raised:
        wait(reply)
    assert parse_exception(str(raised.value)) == ("ConfigError", "dense.net = 'mlp': is wrong")


def test_unknown_functions_and_unsendable_results_are_errors(client: SocketClient) -> None:
    with pytest.raises(RuntimeError, match=r"KeyError: .*:complete"):
        wait(client.call(complete, ()))
    with pytest.raises(RuntimeError, match=r"ClusterError: .* on meta "):
        wait(client.call(on_device, ()))
    assert doubled(client, 4) == 8


@pytest.mark.parametrize("value", [7, None, ("f",), ([], 1)], ids=str)
def test_a_malformed_call_is_rejected_and_the_next_is_served(value: object) -> None:
    ours, theirs = connection()
    server = SocketServer(theirs, FUNCTIONS)
    ours.socket.send(ours.frames.seal(Message(FrameKind.CALL, 1, value)))
    assert eventually(lambda: ours.frames.receive(ours.socket), SECONDS)
    message = ours.frames.next()
    assert message is not None
    assert (message.kind, message.number) == (FrameKind.FAILURE, 1)
    client = SocketClient(ours, SECONDS)
    assert doubled(client, 4) == 8
    client.close()
    server.close(SECONDS)


def test_calls_and_responses_of_several_threads(client: SocketClient) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: doubled(client, n), range(400))) == list(range(0, 800, 2))
        replies = [client.call(defer, number) for number in range(400)]
        assert eventually(lambda: len(deferred) == len(replies), SECONDS)
        done = pool.map(lambda n: deferred.pop(n).set_result([torch.full((n,), n)]), range(len(replies)))
        assert [reply.wait()[0].tolist() for reply in replies] == [[n] * n for n in range(len(replies))]
        assert list(done)


def test_a_trainer_that_does_not_read_blocks_no_other() -> None:
    with connected_clients(trainers=2) as (slow, quick):
        replies = [slow.call(large, ()) for _ in range(3)]
        assert [doubled(quick, each) for each in range(100)] == [2 * each for each in range(100)]
        assert all(torch.equal(reply.wait()[0], torch.arange(LARGE)) for reply in replies)
        later = slow.call(defer, 1)
        assert eventually(lambda: 1 in deferred, SECONDS)
        deferred.pop(1).set_result([torch.arange(LARGE)])  # this thread leaves the rest to the server's
        assert later.wait()[0].shape == (LARGE,)


def test_large_messages_go_both_ways_at_once(client: SocketClient) -> None:
    ahead = [client.call(large, ()) for _ in range(2)]
    assert client.call(double, 1, [torch.arange(LARGE)]).wait()[1].shape == (LARGE,)
    assert all(reply.wait()[0].shape == (LARGE,) for reply in ahead)


def test_a_worker_that_is_gone_is_lost(ends: tuple[SocketClient, Connection]) -> None:
    client, theirs = ends
    waiting = client.call(double, 1)
    theirs.socket.close()
    for reply in (waiting, client.call(double, 2)):
        with pytest.raises(LostError, match=r"^worker 0 "):
            wait(reply)


def test_a_silent_worker_is_lost_after_the_timeout() -> None:
    ours, theirs = connection()
    client = SocketClient(ours, 0.05)
    late = client.call(double, 1)
    for has_come in (False, True):
        with pytest.raises(LostError, match=r"^worker 0 .*0\.05 s"):
            wait(late)
        if not has_come:
            theirs.socket.send(theirs.frames.seal(Message(FrameKind.RESPONSE, 1, None)))
            client.call(double, 2).done()  # reads for all calls
    with pytest.raises(LostError):  # the worker does not even read
        wait(client.call(double, 1, [torch.zeros(LARGE)]))
    client.close()
    theirs.socket.close()


def test_the_timeout_counts_from_the_wait(client: SocketClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may pause between steps, while a prefetched lookup waits for gradients of the next step."""
    early, now = client.call(defer, 1), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 10 * SECONDS)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(early.wait)
        assert not futures.wait([waiting], timeout=0.05).done
        deferred.pop(1).set_result([torch.ones(2)])
        assert waiting.result(SECONDS)[0].tolist() == [1, 1]


def test_an_altered_response_is_rejected(ends: tuple[SocketClient, Connection]) -> None:
    client, theirs = ends
    reply = client.call(double, 1)
    frame = bytearray(theirs.frames.seal(Message(FrameKind.FAILURE, 1, "no")))
    frame[-1] ^= 1
    theirs.socket.send(frame)
    for each in (reply, client.call(double, 2)):
        with pytest.raises(ClusterError):
            wait(each)
    assert eventually(lambda: is_closed(theirs.socket), SECONDS)


def test_an_altered_call_ends_only_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    (altered, theirs), (ours, others) = connection(), connection()
    servers = [SocketServer(each, FUNCTIONS) for each in (theirs, others)]
    client = SocketClient(ours, SECONDS)
    frame = bytearray(altered.frames.seal(Message(FrameKind.CALL, 1, ("double", 1))))
    frame[-1] ^= 1
    with caplog.at_level(logging.WARNING):
        altered.socket.send(frame)
        assert eventually(lambda: is_closed(altered.socket), SECONDS)
    assert "rejected a message of a trainer" in caplog.text
    assert doubled(client, 4) == 8
    client.close()
    altered.socket.close()
    for server in servers:
        server.close(SECONDS)


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_open_calls_fail_when_the_client_closes(client: SocketClient) -> None:
    reply = client.call(defer, 1)
    client.close()
    with pytest.raises(LostError):
        wait(reply)
    assert eventually(lambda: 1 in deferred, SECONDS)
    deferred.pop(1).set_result([])


def test_threads_and_descriptors_end_with_the_server() -> None:
    threads, num_files = set(threading.enumerate()), psutil.Process().num_fds()
    with connected_clients(trainers=3) as clients:
        assert [doubled(client, 1) for client in clients] == [2] * 3
        assert len([t for t in threading.enumerate() if t.name == "socket server"]) == 3
    assert set(threading.enumerate()) == threads
    assert psutil.Process().num_fds() == num_files


def test_close_raises_the_error_of_a_server_thread() -> None:
    ours, theirs = connection()

    class FailingFrames(Frames):
        def receive(self, connection: socket.socket) -> bool:
            raise MemoryError("no more")

    theirs.frames.__class__ = FailingFrames
    server = SocketServer(theirs, FUNCTIONS)
    client = SocketClient(ours, SECONDS)
    with pytest.raises(LostError):
        wait(client.call(double, 1))
    with pytest.raises(MemoryError, match="no more"):
        server.close(SECONDS)
    client.close()

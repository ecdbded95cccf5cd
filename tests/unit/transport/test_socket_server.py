"""Calls by sockets, from a trainer's client to a worker's server and back."""

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from support.socket_ends import WORKER, connection
from torch import Tensor
from torch.futures import Future

from hybrid.errors import ConfigError
from hybrid.primitives.deferred_response import ObservableResult
from hybrid.security.rejected_messages import parse_exception
from hybrid.transport.rpc.pending_calls import LostError, PendingTensors, RejectedCallError
from hybrid.transport.socket.frames import FrameKind, Frames, Message
from hybrid.transport.socket.handshake import Connection
from hybrid.transport.socket.socket_client import SocketClient
from hybrid.transport.socket.socket_server import SocketServer

SECONDS = 10.0
LARGE = 4 << 20  # values: more bytes than a connection holds

promises: dict[int, Future[list[Tensor]]] = {}


def known(*tensors: Tensor) -> Future[list[Tensor]]:
    future: Future[list[Tensor]] = Future()
    future.set_result(list(tensors))
    return future


def double(number: int, tensors: Sequence[Tensor]) -> Future[list[Tensor]]:
    return known(torch.tensor(2 * number), *tensors)


def promise(number: int, _: Sequence[Tensor]) -> Future[list[Tensor]]:
    promises[number] = Future()
    return promises[number]


def refuse(*_: object) -> Future[list[Tensor]]:
    raise ConfigError("dense.net", "is not to my taste", "mlp")


def large(*_: object) -> Future[list[Tensor]]:
    return known(torch.arange(LARGE))


def cannot_travel(*_: object) -> Future[list[Tensor]]:
    return known(torch.ones(1, device="meta"))


FUNCTIONS = (double, promise, refuse, large, cannot_travel)


@pytest.fixture(params=[False, True], ids=["two hosts", "one host"], autouse=True)
def is_one_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both ends of every connection are."""
    monkeypatch.setattr(sys.modules[__name__], "connection", partial(connection, request.param))


@contextmanager
def connected_clients(trainers: int = 1, timeout_seconds: float = SECONDS) -> Iterator[list[SocketClient]]:
    """Links of so many trainers to one server."""
    ends = [connection() for _ in range(trainers)]
    links = [SocketClient(ours, timeout_seconds) for ours, _ in ends]
    server = SocketServer([theirs for _, theirs in ends], FUNCTIONS)
    try:
        yield links
    finally:
        for link in links:
            link.close()
        server.close(SECONDS)


@pytest.fixture
def ends() -> Iterator[tuple[SocketClient, Connection]]:
    """A link, and what it is connected to."""
    ours, theirs = connection()
    link = SocketClient(ours, SECONDS)
    yield link, theirs
    link.close()
    theirs.socket.close()


@pytest.fixture
def link() -> Iterator[SocketClient]:
    with connected_clients() as (link,):
        yield link


def until(is_so: Callable[[], object]) -> None:
    """Give others time until something is so."""
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def answer_to(watched: ObservableResult[Any]) -> Any:
    """What a stub makes of an answer."""
    return PendingTensors[Any](WORKER, watched).wait()


def doubled(link: SocketClient, number: int) -> int:
    """What comes of a call that is answered at once."""
    return int(link.call(double, number).wait()[0])


def test_a_call_returns_its_response(link: SocketClient) -> None:
    assert [doubled(link, each) for each in range(3)] == [0, 2, 4]
    assert [each.tolist() for each in link.call(double, 3, [torch.ones(2)]).wait()] == [6, [1, 1]]


def test_responses_arrive_in_any_order(link: SocketClient) -> None:
    first, second = link.call(promise, 1), link.call(promise, 2)
    called: list[Any] = []
    first.add_done_callback(called.append)
    assert doubled(link, 3) == 6
    assert not first.done()
    promises.pop(2).set_result([torch.zeros(1)])
    assert second.wait()[0].tolist() == [0]
    assert not called
    promises.pop(1).set_result([torch.ones(2)])
    until(first.done)
    assert called == [first]
    first.add_done_callback(called.append)
    assert called == [first, first]
    assert first.wait()[0].tolist() == [1, 1]


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_remote_exception_keeps_its_message(when: str, link: SocketClient) -> None:
    if when == "at once":
        reply = link.call(refuse, ())
    else:
        reply = link.call(promise, 1)
        until(lambda: 1 in promises)
        error: Any = ConfigError("dense.net", "is not to my taste", "mlp")  # torch's annotation is wrong
        promises.pop(1).set_exception(error)
    with pytest.raises(RuntimeError) as caught:
        answer_to(reply)
    assert parse_exception(str(caught.value)) == ("ConfigError", "dense.net = 'mlp': is not to my taste")


def test_unknown_functions_and_unsendable_results_are_errors(link: SocketClient) -> None:
    with pytest.raises(RuntimeError, match=r"KeyError: .*:known"):
        answer_to(link.call(known, ()))
    with pytest.raises(RuntimeError, match=r"ClusterError: tensors on a GPU cannot be sent"):
        answer_to(link.call(cannot_travel, ()))
    assert doubled(link, 4) == 8


@pytest.mark.parametrize("value", [7, None, ("f",), ([], 1)], ids=str)
def test_a_call_that_is_malformed_is_rejected_and_the_next_is_served(value: object) -> None:
    ours, theirs = connection()
    server = SocketServer([theirs], FUNCTIONS)
    ours.socket.send(ours.frames.seal(Message(FrameKind.CALL, 1, value)))
    until(lambda: ours.frames.receive(ours.socket))
    message = ours.frames.next()
    assert message is not None
    assert (message.kind, message.number) == (FrameKind.FAILURE, 1)
    link = SocketClient(ours, SECONDS)
    assert doubled(link, 4) == 8
    link.close()
    server.close(SECONDS)


def test_calls_of_several_threads_are_served(link: SocketClient) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: doubled(link, n), range(400))) == list(range(0, 800, 2))


def test_responses_of_several_threads_are_received(link: SocketClient) -> None:
    replies = [link.call(promise, number) for number in range(400)]
    until(lambda: len(promises) == len(replies))
    with ThreadPoolExecutor(8) as pool:
        done = pool.map(lambda n: promises.pop(n).set_result([torch.full((n,), n)]), range(len(replies)))
        assert [reply.wait()[0].tolist() for reply in replies] == [[n] * n for n in range(len(replies))]
        assert list(done)


def test_a_trainer_that_does_not_read_blocks_no_other() -> None:
    with connected_clients(trainers=5) as (slow, *_, quick):  # four threads read, so one reads both
        answers = [slow.call(large, ()) for _ in range(3)]
        assert [doubled(quick, each) for each in range(100)] == [2 * each for each in range(100)]
        assert all(torch.equal(answer.wait()[0], torch.arange(LARGE)) for answer in answers)
        later = slow.call(promise, 1)
        until(lambda: 1 in promises)
        promises.pop(1).set_result([torch.arange(LARGE)])  # left to the reader by another thread
        assert later.wait()[0].shape == (LARGE,)


def test_large_messages_go_both_ways_at_once(link: SocketClient) -> None:
    ahead = [link.call(large, ()) for _ in range(2)]
    assert link.call(double, 1, [torch.arange(LARGE)]).wait()[1].shape == (LARGE,)
    assert all(answer.wait()[0].shape == (LARGE,) for answer in ahead)


def test_a_worker_that_is_gone_is_lost(ends: tuple[SocketClient, Connection]) -> None:
    link, theirs = ends
    waiting = link.call(double, 1)
    theirs.socket.close()
    for reply in (waiting, link.call(double, 2)):
        with pytest.raises(LostError, match=r"^worker 0 does not answer \("):
            answer_to(reply)


def test_a_silent_worker_is_lost_after_the_timeout() -> None:
    ours, theirs = connection()
    link = SocketClient(ours, 0.05)
    late = link.call(double, 1)
    for is_there in (False, True):
        with pytest.raises(LostError, match=r"^worker 0 does not answer \(nothing came for 0.05 s\)$"):
            answer_to(late)
        if not is_there:
            theirs.socket.send(theirs.frames.seal(Message(FrameKind.RESPONSE, 1, None)))
            link.call(double, 2).done()  # reads for all
    with pytest.raises(LostError, match="nothing came for"):  # it does not even read
        answer_to(link.call(double, 1, [torch.zeros(LARGE)]))
    link.close()
    theirs.socket.close()


def test_an_altered_response_is_rejected(ends: tuple[SocketClient, Connection]) -> None:
    link, theirs = ends
    reply = link.call(double, 1)
    frame = bytearray(theirs.frames.seal(Message(FrameKind.FAILURE, 1, "no")))
    frame[-1] ^= 1
    theirs.socket.send(frame)
    for each in (reply, link.call(double, 2)):
        with pytest.raises(RejectedCallError, match="altered, repeated or left out"):
            answer_to(each)
    until(lambda: _is_closed(theirs.socket))


def test_an_altered_call_ends_only_its_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (bad, behind), (good, beside) = connection(), connection()
    server = SocketServer([behind, beside], FUNCTIONS)
    link = SocketClient(good, SECONDS)
    frame = bytearray(bad.frames.seal(Message(FrameKind.CALL, 1, ("double", 1))))
    frame[-1] ^= 1
    with caplog.at_level(logging.WARNING):
        bad.socket.send(frame)
        until(lambda: _is_closed(bad.socket))
    assert "rejected a message, and closed the connection: it was altered" in caplog.text
    assert doubled(link, 4) == 8
    link.close()
    bad.socket.close()
    server.close(SECONDS)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_open_calls_fail_when_the_client_closes(link: SocketClient) -> None:
    reply = link.call(promise, 1)
    link.close()
    with pytest.raises(LostError, match="this process is leaving"):
        answer_to(reply)
    until(lambda: 1 in promises)
    promises.pop(1).set_result([])


def test_threads_and_descriptors_end_with_the_server() -> None:
    threads, files = set(threading.enumerate()), psutil.Process().num_fds()
    with connected_clients(trainers=6) as links:
        assert [doubled(link, 1) for link in links] == [2] * 6
        assert 0 < len([t for t in threading.enumerate() if t.name == "socket server"]) <= 4
    assert set(threading.enumerate()) == threads
    assert psutil.Process().num_fds() == files


def test_close_raises_the_error_of_a_reader_thread() -> None:
    ours, theirs = connection()

    class Failing(Frames):
        def receive(self, connection: socket.socket) -> bool:
            raise MemoryError("no more")

    theirs.frames.__class__ = Failing
    server = SocketServer([theirs], FUNCTIONS)
    link = SocketClient(ours, SECONDS)
    with pytest.raises(LostError):
        answer_to(link.call(double, 1))
    with pytest.raises(MemoryError, match="no more"):
        server.close(SECONDS)
    link.close()

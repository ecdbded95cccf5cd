"""Calls over the connections between trainers and workers.

A trainer reads responses when one of its threads waits for a response. A worker has a thread for each
trainer, which reads calls and executes them. A called function returns a future; the thread that completes
the future sends the response. No thread waits for a trainer that does not read: bytes that the kernel cannot
accept yet are buffered, and sent later.
"""

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor
from torch.futures import Future

from hybrid.errors import describe_exception, first_line
from hybrid.primitives.thread_counts import use_configured_threads
from hybrid.security.rejections import RejectionError, describe_rejection
from hybrid.transport.socket.frames import FrameKind, Message
from hybrid.transport.socket.handshake import Connection
from hybrid.user_code.user_modules import qualified_name

ServedFunction: TypeAlias = Callable[[Any, Sequence[Tensor]], Future[Any]]

_LOG = logging.getLogger(__name__)


class Reply:
    """The response to a call by socket, which may not have arrived yet."""

    __slots__ = ("_callbacks", "_client", "_completing", "_error", "_tensors", "is_done")

    def __init__(self, client: "SocketClient") -> None:
        self._client = client
        self._completing = threading.Lock()
        self._callbacks: list[Callable[[Any], None]] = []
        self._tensors: Sequence[Tensor] = ()
        self._error: str | None = None
        self.is_done = False

    def done(self) -> bool:
        """Return whether the response has arrived, or the call has failed."""
        if not self.is_done:
            self._client.poll()
        return self.is_done

    def wait(self) -> Sequence[Tensor]:
        """Return the tensors; RuntimeError with the reason if the call or the connection has failed."""
        if not self.is_done:
            self._client.read_until(self)
        if self._error is not None:
            raise RuntimeError(self._error)
        return self._tensors

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` with this reply once the reply is complete, or at once if it already is."""
        with self._completing:
            if not self.is_done:
                self._callbacks.append(callback)
                return
        callback(self)

    def complete(self, tensors: Sequence[Tensor], error: str | None = None) -> None:
        """Complete the reply with tensors, or with an error text. Only the first call has an effect."""
        with self._completing:
            if self.is_done:
                return
            self._tensors = tensors
            self._error = error
            self.is_done = True
        for callback in self._callbacks:
            callback(self)
        self._callbacks.clear()


class SocketClient:
    """A trainer's connection to a worker. Any thread may call; one thread at a time reads all responses.

    Args:
        connection: closed by :meth:`close`.
        timeout_seconds: limit of the time to send a call, and of the time in ``Reply.wait``. The time between
            both is not limited, because a lookup may be sent a step before its vectors are needed.
    """

    def __init__(self, connection: Connection, timeout_seconds: float) -> None:
        self._connection, self._frames = connection
        self._timeout_seconds = timeout_seconds
        self._timeout_text = f"no response for {timeout_seconds:g} s"
        self._number = 0
        self._open: dict[int, Reply] = {}
        self._failure: str | None = None
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._readable = select.poll()
        self._writable = select.poll()
        self._readable.register(self._connection, select.POLLIN)
        self._writable.register(self._connection, select.POLLOUT)

    def call(self, function: Callable[..., Any], plain: Any, tensors: Sequence[Tensor] = ()) -> Reply:
        """Send a call of ``function(plain, tensors)``. ``Reply.wait`` raises if the connection fails.

        Raise ClusterError for a tensor that is not on the CPU, or whose dtype cannot be sent.
        """
        reply = Reply(self)
        with self._sending:
            deadline = time.monotonic() + self._timeout_seconds
            self._number += 1
            call = Message(FrameKind.CALL, self._number, (qualified_name(function), plain), tensors)
            frame = self._frames.seal(call)
            self._open[self._number] = reply
            try:
                while frame:
                    try:
                        frame = frame[self._connection.send(frame) :]
                    except BlockingIOError:  # the worker always has a thread that reads
                        if not self._writable.poll(_milliseconds_to(deadline)):
                            raise TimeoutError(self._timeout_text) from None
            except OSError as error:
                self._fail(first_line(error))
        return reply

    def poll(self) -> None:
        """Read bytes that have arrived, unless another thread reads; do not wait."""
        if self._receiving.acquire(blocking=False):
            try:
                self._read()
            finally:
                self._receiving.release()

    def read_until(self, reply: Reply) -> None:
        """Read until ``reply`` is complete. After the timeout, complete it with an error."""
        deadline = time.monotonic() + self._timeout_seconds
        while not reply.is_done:
            with self._receiving:
                if reply.is_done or self._read():
                    continue
                if not self._readable.poll(_milliseconds_to(deadline)):
                    reply.complete((), self._timeout_text)

    def _read(self) -> bool:
        """Read bytes that have arrived. Return True if there were any, or if the connection has failed."""
        try:
            if not self._frames.receive(self._connection):
                return False
            while (message := self._frames.next()) is not None:
                reply = self._open.pop(message.number, None)
                if reply is None:
                    raise RejectionError("it responds to no call")
                if message.kind is FrameKind.FAILURE:
                    reply.complete((), message.value)
                else:
                    reply.complete(message.tensors)
        except OSError as error:
            self._fail(first_line(error))
        except RejectionError as error:
            self._fail(describe_rejection(str(error)))
        return True

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        with suppress(OSError):  # it is closed already
            self._connection.shutdown(socket.SHUT_RDWR)
        for reply in list(self._open.values()):  # no effect on those that another thread has completed
            reply.complete((), self._failure)

    def close(self) -> None:
        """Close the connection; calls without a response fail."""
        self._fail("this process is leaving")
        self._connection.close()
        self._frames.close()


class SocketServer:
    """A thread on a worker that executes the calls of one trainer, which may call only ``functions``."""

    def __init__(self, connection: Connection, functions: Sequence[ServedFunction]) -> None:
        self._connection, self._frames = connection
        self._functions = {qualified_name(each): each for each in functions}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._unsent = bytearray()
        self._has_ended = False
        self._error: Exception | None = None
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="socket server", daemon=True)
        self._thread.start()

    def close(self, timeout_seconds: float) -> None:
        """End the thread and close the connection; raise the error that ended the thread early, if any."""
        self._has_ended = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout_seconds)
        if not self._thread.is_alive():
            os.close(self._wake)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        use_configured_threads()
        poll = select.poll()
        number = self._connection.fileno()
        poll.register(self._wake, select.POLLIN)
        try:
            while not self._has_ended:
                poll.register(number, select.POLLIN | (select.POLLOUT if self._unsent else 0))
                events = dict(poll.poll())
                if self._wake in events:
                    os.eventfd_read(self._wake)
                if events.get(number, 0) & select.POLLOUT:
                    self._send_unsent()
                if events.get(number, 0) & ~select.POLLOUT:
                    self._read()
        except OSError:  # the trainer has ended, which the master detects
            pass
        except RejectionError as error:
            _LOG.warning("rejected a message of a trainer, and closed the connection: %s", error)
        except Exception as error:  # close() raises it; the trainer sees a closed connection
            _LOG.exception("the thread that serves a trainer's calls failed")
            self._error = error
        finally:
            with self._sending:
                self._has_ended = True  # later responses are dropped
                with suppress(OSError):  # it is closed already
                    self._connection.shutdown(socket.SHUT_RDWR)
                self._connection.close()
                self._frames.close()

    def _read(self) -> None:
        self._frames.receive(self._connection)
        while (message := self._frames.next()) is not None:
            try:
                function, plain = message.value
                future = self._functions[function](plain, message.tensors)
            except Exception as error:  # reported to the caller
                self._send_message(Message(FrameKind.FAILURE, message.number, describe_exception(error)))
            else:
                future.add_done_callback(partial(self._respond, message.number))

    def _respond(self, number: int, future: Future[Sequence[Tensor]]) -> None:
        try:
            message = Message(FrameKind.RESPONSE, number, None, future.value())
        except Exception as error:  # reported to the caller
            message = Message(FrameKind.FAILURE, number, describe_exception(error))
        self._send_message(message)

    def _send_message(self, message: Message) -> None:
        with self._sending:
            if self._has_ended:
                return
            try:
                frame = self._frames.seal(message)
            except Exception as error:  # the result cannot be sent: reported to the caller
                failure = Message(FrameKind.FAILURE, message.number, describe_exception(error))
                frame = self._frames.seal(failure)
            if not self._unsent:
                frame = frame[self._send(frame) :]
            if frame:
                self._unsent += frame
                os.eventfd_write(self._wake, 1)

    def _send_unsent(self) -> None:
        with self._sending:
            with memoryview(self._unsent) as unsent:
                sent = self._send(unsent)
            del self._unsent[:sent]

    def _send(self, data: memoryview) -> int:
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the next read reports it
            return len(data)


def _milliseconds_to(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic()) * 1e3

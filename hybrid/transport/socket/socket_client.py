"""A trainer's end of a connection to a worker. Responses are read when a thread waits for them."""

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from hybrid.errors import first_line
from hybrid.security.rejected_messages import RejectedMessage, describe_rejection
from hybrid.topology import Role
from hybrid.transport.rpc.pending_calls import Reply
from hybrid.transport.socket.frames import FrameKind, Message
from hybrid.transport.socket.handshake import Connection
from hybrid.user_code.function_names import qualified_name


class SocketClient:
    """A trainer's connection to a worker, for any threads; one at a time reads for all.

    Args:
        connection: owned by this object.
        timeout_seconds: of every call.
    """

    def __init__(self, connection: Connection, timeout_seconds: float) -> None:
        self._connection, self._frames = connection
        self._timeout_seconds = timeout_seconds
        self._number = 0
        self._open: dict[int, Reply] = {}
        self._failure: str | None = None
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._connection, select.POLLIN)
        self._writable.register(self._connection, select.POLLOUT)

    def call(self, function: Callable[..., Any], plain: Any, tensors: Sequence[Tensor] = ()) -> Reply:
        """Send a call of ``function(plain, tensors)``, one of the functions that the worker serves.

        Args:
            plain: numbers, text, and tuples and lists of such.
        """
        deadline = time.monotonic() + self._timeout_seconds
        reply = Reply(partial(self._read_until, deadline), self._poll)
        with self._sending:
            self._number += 1
            self._open[self._number] = reply
            call = Message(FrameKind.CALL, self._number, (qualified_name(function), plain), tensors)
            frame = self._frames.seal(call)
            try:
                while frame:
                    try:
                        frame = frame[self._connection.send(frame) :]
                    except BlockingIOError:  # the worker reads, whatever else it does
                        if not self._writable.poll(_milliseconds_to(deadline)):
                            raise TimeoutError(self._describe_timeout()) from None
            except OSError as error:
                self._fail(first_line(error))
        return reply

    def _poll(self) -> None:
        """Read what has arrived, unless another thread does; waits for nothing."""
        if self._receiving.acquire(blocking=False):
            try:
                self._read()
            finally:
                self._receiving.release()

    def _read_until(self, deadline: float, reply: Reply) -> None:
        """Read until ``reply`` is complete, at the deadline at the latest."""
        while not reply.is_done:
            with self._receiving:
                if reply.is_done or self._read():
                    continue
                if not self._readable.poll(_milliseconds_to(deadline)):
                    reply.complete((), self._describe_timeout())

    def _read(self) -> bool:
        """Read what has arrived; whether anything has, an end included."""
        try:
            if not self._frames.receive(self._connection):
                return False
            while (message := self._frames.next()) is not None:
                if (reply := self._open.pop(message.number, None)) is None:
                    raise RejectedMessage("it responds to no call")
                if message.kind is FrameKind.FAILURE:
                    reply.complete((), message.value)
                else:
                    reply.complete(message.tensors)
        except OSError as error:
            self._fail(first_line(error))
        except RejectedMessage as error:
            self._fail(describe_rejection(str(error)))
        return True

    def _fail(self, reason: str) -> None:
        """Shut the connection down, and fail all open calls."""
        self._failure = self._failure or reason
        with suppress(OSError):  # it is closed already
            self._connection.shutdown(socket.SHUT_RDWR)
        for number in list(self._open):  # another thread may complete some of them
            if (reply := self._open.pop(number, None)) is not None:
                reply.complete((), self._failure)

    def _describe_timeout(self) -> str:
        return f"nothing came for {self._timeout_seconds:g} s"

    def close(self) -> None:
        """Close the connection; open calls fail."""
        self._fail("this process is leaving")
        self._connection.close()
        self._frames.close()


def _milliseconds_to(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic()) * 1e3


# On a trainer, the clients of all workers, while it is a member of a cluster.
CLIENTS: dict[Role, SocketClient] = {}

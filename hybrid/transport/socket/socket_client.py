"""A trainer's end of a connection to a worker: calls, and their answers once somebody waits for them."""

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from hybrid.errors import first_line
from hybrid.security.rejected_messages import RejectedMessage, describe_rejection
from hybrid.topology import Role
from hybrid.transport.rpc.reply import Reply
from hybrid.transport.socket.frames import Kind, Message
from hybrid.transport.socket.handshake import Connection
from hybrid.user_code.function_names import qualified_name


class LinkReply(Reply):
    """The answer to a call by a link.

    Attributes:
        deadline: by the monotonic clock, when it is due at the latest.
    """

    __slots__ = ("_link", "deadline")

    def __init__(self, link: "Link", deadline: float) -> None:
        super().__init__()
        self.deadline = deadline
        self._link = link

    def done(self) -> bool:
        """Whether the answer has come; takes what has."""
        if not self.is_done:
            self._link.look()
        return self.is_done

    def _take(self) -> None:
        self._link.read_until(self)


class Link:
    """A connection to a worker, as its trainer has it. For any threads; one at a time reads for all.

    Args:
        connection: belongs to the link now.
        timeout_seconds: of every call.
    """

    def __init__(self, connection: Connection, timeout_seconds: float) -> None:
        self._connection, self._frames = connection
        self._timeout_seconds = timeout_seconds
        self._number = 0
        self._open: dict[int, LinkReply] = {}
        self._failure: str | None = None
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._connection, select.POLLIN)
        self._writable.register(self._connection, select.POLLOUT)

    def call(self, function: Callable[..., Any], plain: Any, tensors: Sequence[Tensor] = ()) -> LinkReply:
        """Start ``function(plain, tensors)``, of those that the worker answers to; returns once it has left.

        Args:
            plain: numbers, text, and tuples and lists of such.
        """
        reply = LinkReply(self, time.monotonic() + self._timeout_seconds)
        with self._sending:
            self._number += 1
            self._open[self._number] = reply
            call = Message(Kind.CALL, self._number, (qualified_name(function), plain), tensors)
            frame = self._frames.seal(call)
            try:
                self._send(frame, reply.deadline)
            except OSError as error:
                self._fail(first_line(error))
        return reply

    def _send(self, frame: memoryview, deadline: float) -> None:
        while True:
            try:
                frame = frame[self._connection.send(frame) :]
            except BlockingIOError:  # the worker reads, whatever else it does
                if not self._writable.poll(_milliseconds_to(deadline)):
                    raise TimeoutError(self._late()) from None
            if not frame:
                return

    def look(self) -> None:
        """Read what has come, unless another thread is at it; waits for nothing."""
        if self._receiving.acquire(blocking=False):
            try:
                self._read()
            finally:
                self._receiving.release()

    def read_until(self, reply: LinkReply) -> None:
        """Read until ``reply`` is there, or its time is up."""
        while not reply.is_done:
            with self._receiving:
                if reply.is_done or self._read():
                    continue
                if not self._readable.poll(_milliseconds_to(reply.deadline)):
                    reply.complete((), self._late())

    def _read(self) -> bool:
        """Read what has come; whether anything has, an end too."""
        try:
            if not self._frames.receive(self._connection):
                return False
            while (message := self._frames.next()) is not None:
                self._take(message)
        except OSError as error:
            self._fail(first_line(error))
        except RejectedMessage as error:
            self._fail(describe_rejection(str(error)))
        return True

    def _take(self, message: Message) -> None:
        if (reply := self._open.pop(message.number, None)) is None:
            raise RejectedMessage("it answers no call")
        if message.kind is Kind.FAILED:
            reply.complete((), message.value)
        else:
            reply.complete(message.tensors)

    def _fail(self, words: str) -> None:
        """Nothing goes this way any more; all who wait learn why."""
        self._failure = self._failure or words
        with suppress(OSError):  # it has gone by itself
            self._connection.shutdown(socket.SHUT_RDWR)
        for number in list(self._open):  # another thread may take some of them
            if (reply := self._open.pop(number, None)) is not None:
                reply.complete((), self._failure)

    def _late(self) -> str:
        return f"nothing came for {self._timeout_seconds:g} s"

    def close(self) -> None:
        """End it; who still waits learns that."""
        self._fail("this process is leaving")
        self._connection.close()
        self._frames.close()


def _milliseconds_to(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic()) * 1e3


# To the workers, where this process is a trainer; there from joining a cluster to leaving it, as RPC is.
LINKS: dict[Role, Link] = {}

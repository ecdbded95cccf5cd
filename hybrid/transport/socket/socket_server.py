"""A worker's end of its connections to trainers: it serves their calls.

A few threads read, each for some of the trainers. The thread that reads a call executes it. A result that has
to wait is a future; whoever completes it sends the response. No thread waits for a trainer that does not
read: what the kernel does not accept at once is kept, and sent later.
"""

import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor
from torch.futures import Future

from hybrid.security.rejected_messages import RejectedMessage, describe_exception
from hybrid.transport.socket.frames import FrameKind, Message
from hybrid.transport.socket.handshake import Connection
from hybrid.user_code.function_names import qualified_name

ServedFunction: TypeAlias = Callable[[Any, Sequence[Tensor]], Future[Any]]

_LOG = logging.getLogger(__name__)
_MOST_THREADS = 4
_WAIT_SECONDS = 60.0


class SocketServer:
    """Serves calls until it is closed.

    Args:
        trainers: their connections, owned by this object.
        functions: that may be called, with plain values and tensors.
    """

    def __init__(self, trainers: Sequence[Connection], functions: Sequence[ServedFunction]) -> None:
        named = {qualified_name(each): each for each in functions}
        number = min(len(trainers), _MOST_THREADS)
        self._readers = [_Reader(trainers[each::number], named) for each in range(number)]

    def close(self, timeout_seconds: float) -> None:
        """End the threads and close the connections; raises the error that ended a thread early."""
        for reader in self._readers:
            reader.close(timeout_seconds)


class _Reader:
    """One thread, and the connections that it reads."""

    def __init__(self, trainers: Sequence[Connection], functions: Mapping[str, ServedFunction]) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._callers = []
        for connection in trainers:
            caller = _Caller(connection, functions, partial(os.eventfd_write, self._wake, 1))
            self._selector.register(connection.socket, selectors.EVENT_READ, caller)
            self._callers.append(caller)
        self._is_closing = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="socket server", daemon=True)
        self._thread.start()

    def close(self, timeout_seconds: float) -> None:
        """See :meth:`SocketServer.close`."""
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout_seconds)
        if not self._thread.is_alive():
            self._selector.close()
            os.close(self._wake)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._is_closing:
                ready = self._selector.select(_WAIT_SECONDS)
                for key, events in ready:
                    if key.data is None:
                        os.eventfd_read(self._wake)
                        ready = [(each, 0) for each in self._selector.get_map().values()]
                    else:
                        if events & selectors.EVENT_WRITE:
                            key.data.send_unsent()
                        if events & selectors.EVENT_READ:
                            key.data.read()
                for key, _ in ready:
                    if key.data is None or (events := key.data.events) == key.events:
                        continue
                    if events:
                        self._selector.modify(key.fileobj, events, key.data)
                    else:
                        self._selector.unregister(key.fileobj)
                        key.data.close()
        except Exception as error:  # trainers find their connections closed; close() raises it
            _LOG.exception("serving calls has failed")
            self._error = error
        finally:
            for caller in self._callers:
                caller.close()


class _Caller:
    """A trainer's connection.

    Args:
        wake: makes the reader look at ``events`` again.
    """

    def __init__(
        self, connection: Connection, functions: Mapping[str, ServedFunction], wake: Callable[[], None]
    ) -> None:
        self._connection, self._frames = connection
        self._functions = functions
        self._wake = wake
        self._unsent = bytearray()
        self._has_ended = False
        self._sending = threading.Lock()

    @property
    def events(self) -> int:
        """The events that the reader waits for; none after the end of the connection."""
        if self._has_ended:
            return 0
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def read(self) -> None:
        """Read what has arrived, and execute its calls."""
        try:
            self._frames.receive(self._connection)
            while (message := self._frames.next()) is not None:
                try:
                    function, plain = message.value
                    future = self._functions[function](plain, message.tensors)
                except Exception as error:  # reported to the caller
                    failure = describe_exception(error)
                    self._send_message(Message(FrameKind.FAILURE, message.number, failure))
                else:
                    future.add_done_callback(partial(self._respond, message.number))
        except OSError:  # the trainer is gone, which the master notices
            self._has_ended = True
        except RejectedMessage as error:
            _LOG.warning("rejected a message, and closed the connection: %s", error)
            self._has_ended = True

    def _respond(self, number: int, future: Future[Sequence[Tensor]]) -> None:
        try:
            tensors = future.value()
        except Exception as error:  # reported to the caller
            self._send_message(Message(FrameKind.FAILURE, number, describe_exception(error)))
        else:
            self._send_message(Message(FrameKind.RESPONSE, number, None, tensors))

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
                self._wake()

    def send_unsent(self) -> None:
        """Send kept bytes, as many as the kernel accepts."""
        with self._sending:
            with memoryview(self._unsent) as unsent:
                sent = self._send(unsent)
            del self._unsent[:sent]

    def _send(self, data: memoryview) -> int:
        try:
            return self._connection.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # as in read(), which the reader calls next
            self._has_ended = True
            return len(data)

    def close(self) -> None:
        """Close the connection; later responses are dropped."""
        with self._sending:
            self._has_ended = True
            with suppress(OSError):  # it is closed already
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            self._frames.close()

"""Sockets that take nobody in any more, once all whom they are for have come.

What torch listens on, for RPC and for gradients, asks nobody who he is, and serves whoever connects: with a
password or without, a stranger may have an operator of torch run that reads a file, or send a length that
no memory can hold. But only while processes find each other does anyone need to connect. After that, a filter
in the kernel drops what comes to these sockets; the connections that there are have sockets of their own.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_SO_ATTACH_FILTER = 26  # Linux; Python has no name for it
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # of a packet, keep 0 bytes


@contextmanager
def sealed_after() -> Iterator[None]:
    """At the end, seal every socket that this process has begun to listen on meanwhile."""
    with _listening() as sockets:
        before = set(sockets)
    yield
    with _listening() as sockets:
        for inode in sockets.keys() - before:
            _seal(sockets[inode])


@contextmanager
def _listening() -> Iterator[dict[int, socket.socket]]:
    """The sockets that this process listens on, by inode: copies, since others may close theirs meanwhile."""
    found = {}
    with ExitStack() as stack:
        for name in os.listdir("/proc/self/fd"):
            try:
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                copy = stack.enter_context(socket.socket(fileno=os.dup(int(name))))
            except OSError:  # closed meanwhile
                continue
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[os.fstat(copy.fileno()).st_ino] = copy
        yield found


def _seal(listener: socket.socket) -> None:
    if listener.family == socket.AF_UNIX:
        listener.shutdown(socket.SHUT_RDWR)  # packet filters are not for these
        return
    program = ctypes.create_string_buffer(_DROP_ALL)
    filter_ = struct.pack("HP", 1, ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)

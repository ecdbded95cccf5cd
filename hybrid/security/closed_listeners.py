"""Close torch's listening sockets once all roles are connected.

Torch listens for RPC and for process groups without authentication. A peer without the secret could run a
built-in operator that reads a file, or send a length that exhausts the memory. Roles connect to each other
only at the start. After that, these sockets are closed, and so are accepted connections from processes
outside the group. A connection on a Unix socket from a process of the same user stays open.

Torch continues to use the file descriptors of these sockets, so each descriptor must stay valid: ``dup2``
replaces the socket behind a descriptor by an eventfd that is never ready. This needs no privilege.
"""

import json
import os
import select
import socket
import stat
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeAlias

import torch.distributed as dist

# Address and port of the two ends of a connection, the local one first.
_Ends: TypeAlias = tuple[str, str]
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid; see unix(7)
_MAPPED = "::ffff:"  # prefix of an IPv4 address in IPv6


@contextmanager
def close_listeners_after(store: dist.Store, rank: int, world_size: int) -> Iterator[None]:
    """After the ``with`` block, close the listening sockets that this process opened in the block.

    Connections that these sockets accepted are closed, too, unless they come from one of the ``world_size``
    roles. All roles use this context with the same ``store``, and must be connected when the block ends.
    """
    with _sockets() as before:
        known = {inode for inode, each in before.items() if _is_listening(each)}
    yield
    with _sockets() as now:
        listeners = {inode: each for inode, each in now.items() if inode not in known and _is_listening(each)}
        addresses = {_local_address(each) for each in listeners.values()}
        own = [ends for each in now.values() if (ends := _ends(each))]
    # The descriptors that torch has stay valid, and are never ready.
    registrations = _epoll_registrations()
    for number in list(_descriptors()):
        with suppress(OSError):  # closed meanwhile
            if os.fstat(number).st_ino in listeners:
                _replace_by_eventfd(number, registrations[number])
    store.set(f"connections/{rank}", json.dumps(own))
    members = {
        (there, here)
        for each in range(world_size)
        for here, there in json.loads(store.get(f"connections/{each}"))
    }
    # List the sockets again: a connection may have been accepted while its listener was closed.
    with _sockets() as now:
        for each in now.values():
            if _is_listening(each) or _local_address(each) not in addresses:
                continue
            is_member = is_same_user(each) if each.family == socket.AF_UNIX else _ends(each) in members
            if not is_member:
                with suppress(OSError):  # it is closed already
                    each.shutdown(socket.SHUT_RDWR)


def is_same_user(each: socket.socket) -> bool:
    """Whether the peer of a Unix socket belongs to the user of this process."""
    credentials = each.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


@contextmanager
def _sockets() -> Iterator[dict[int, socket.socket]]:
    """Yield a duplicate of each socket of this process, by inode. Other threads may close the originals."""
    duplicates = {}
    with ExitStack() as stack:
        for number in _descriptors():
            try:
                status = os.fstat(number)
                if stat.S_ISSOCK(status.st_mode) and status.st_ino not in duplicates:
                    duplicates[status.st_ino] = stack.enter_context(socket.socket(fileno=os.dup(number)))
            except OSError:  # closed meanwhile
                continue
        yield duplicates


def _descriptors() -> Iterator[int]:
    return map(int, os.listdir("/proc/self/fd"))


def _is_listening(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _local_address(each: socket.socket) -> int | str | bytes:
    address: tuple[str, int] | str | bytes = each.getsockname()
    return address[1] if isinstance(address, tuple) else address


def _ends(each: socket.socket) -> _Ends | None:
    if each.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        here, there = (
            f"{host.removeprefix(_MAPPED)} {port}"
            for host, port, *_ in (each.getsockname(), each.getpeername())
        )
    except OSError:  # not connected
        return None
    return here, there


def _replace_by_eventfd(number: int, registrations: Iterable[tuple[int, int]]) -> None:
    eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        os.dup2(eventfd, number, inheritable=False)
    finally:
        os.close(eventfd)
    # Register the eventfd with the epoll instances of the socket, from which torch removes it later.
    for poll, events in registrations:
        with select.epoll.fromfd(os.dup(poll)) as epoll:
            epoll.register(number, events)


def _epoll_registrations() -> dict[int, list[tuple[int, int]]]:
    """Return, for each descriptor that epoll watches, pairs of epoll descriptor and events; see proc(5)."""
    registrations = defaultdict(list)
    for number in _descriptors():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{number}") != "anon_inode:[eventpoll]":
                continue
            with open(f"/proc/self/fdinfo/{number}") as lines:
                for words in map(str.split, lines):
                    if words[0] == "tfd:":
                        registrations[int(words[1])].append((number, int(words[3], 16)))
    return registrations

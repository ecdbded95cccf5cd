"""Close torch's listening sockets once all roles are connected.

The sockets on which torch listens, for RPC and for process groups, authenticate nobody. A peer without the
secret could have a built-in operator run that reads a file, or send a length that exhausts the memory. Roles
connect to each other only at the start. So these sockets are closed then, and so is every accepted connection
whose other end is no member of the group.

Torch would listen in vain on a closed socket for as long as it lives. So the number of the descriptor is
given to an eventfd that is never ready: torch keeps a descriptor that it may wait for and close. This takes
no privilege.
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

# The two ends of a connection, the local one first: addresses with their ports.
_Ends: TypeAlias = tuple[str, str]
_CREDENTIALS = struct.Struct("iII")  # of unix(7): pid, uid, gid
_MAPPED = "::ffff:"  # prefix of an IPv4 address in IPv6


@contextmanager
def close_listeners_after(store: dist.Store, rank: int, world_size: int) -> Iterator[None]:
    """At the end of a ``with`` block, close the sockets on which this process started to listen meanwhile.

    Connections of members stay. Every member of the group leaves such a block after all are connected.

    Args:
        store: shared by the group alone; each of its keys is used once.
        rank, world_size: of this process in the group.
    """
    with _sockets() as before:
        known = {inode for inode, each in before.items() if _is_listening(each)}
    yield
    with _sockets() as now:
        listeners = {inode: each for inode, each in now.items() if inode not in known and _is_listening(each)}
        addresses = {_local_address(each) for each in listeners.values()}
        own = [ends for each in now.values() if (ends := _ends(each))]
    # Torch holds their descriptors, which stay valid, and are never ready.
    waiting = _waiting()
    for number in list(_descriptors()):
        with suppress(OSError):  # closed meanwhile
            if os.fstat(number).st_ino in listeners:
                _replace(number, waiting[number])
    store.set(f"connections/{rank}", json.dumps(own))
    members = {
        (there, here)
        for each in range(world_size)
        for here, there in json.loads(store.get(f"connections/{each}"))
    }
    # Listed again: a connection that was being accepted when its listener closed is there by now.
    with _sockets() as now:
        for each in now.values():
            if _is_listening(each) or _local_address(each) not in addresses:
                continue
            is_member = is_same_user(each) if each.family == socket.AF_UNIX else _ends(each) in members
            if not is_member:
                with suppress(OSError):  # it is closed already
                    each.shutdown(socket.SHUT_RDWR)


def is_same_user(each: socket.socket) -> bool:
    """Whether a process of the same user is at the other end of a connection of AF_UNIX."""
    credentials = each.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


@contextmanager
def _sockets() -> Iterator[dict[int, socket.socket]]:
    """Duplicates of this process's sockets, by inode; their owners may close the originals meanwhile."""
    found = {}
    with ExitStack() as stack:
        for number in _descriptors():
            try:
                status = os.fstat(number)
                if stat.S_ISSOCK(status.st_mode) and status.st_ino not in found:
                    found[status.st_ino] = stack.enter_context(socket.socket(fileno=os.dup(number)))
            except OSError:  # closed meanwhile
                continue
        yield found


def _descriptors() -> Iterator[int]:
    return map(int, os.listdir("/proc/self/fd"))


def _is_listening(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _local_address(each: socket.socket) -> int | str | bytes:
    """The port or name that a listener shares with the connections that it has accepted."""
    address: tuple[str, int] | str | bytes = each.getsockname()
    return address[1] if isinstance(address, tuple) else address


def _ends(each: socket.socket) -> _Ends | None:
    """Return the ends of a TCP connection; None for another socket."""
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


def _replace(number: int, waiting: Iterable[tuple[int, int]]) -> None:
    silent = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        os.dup2(silent, number, inheritable=False)
    finally:
        os.close(silent)
    # Register the successor with the epoll instances of the socket: torch unregisters it later.
    for poll, events in waiting:
        with select.epoll.fromfd(os.dup(poll)) as epoll:
            epoll.register(number, events)


def _waiting() -> dict[int, list[tuple[int, int]]]:
    """Return, by descriptor, the epoll instances that wait for it and their events; see proc(5)."""
    found = defaultdict(list)
    for number in _descriptors():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{number}") != "anon_inode:[eventpoll]":
                continue
            with open(f"/proc/self/fdinfo/{number}") as lines:
                for words in map(str.split, lines):
                    if words[0] == "tfd:":
                        found[int(words[1])].append((number, int(words[3], 16)))
    return found

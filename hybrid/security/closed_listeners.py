"""Sockets that take nobody in any more, once all whom they are for have come.

What torch listens on, for RPC and for gradients, asks nobody who he is, and serves whoever connects: with a
password or without, a stranger may have an operator of torch run that reads a file, or send a length that
no memory can hold. But only while processes find each other does anyone need to connect. After that these
sockets are closed, and so is what has connected to them and is no member of the group.

Torch does not let go of a socket that it listens on, and would listen on it in vain for as long as it lives.
So the number of the descriptor is given to another file, which never has anything to say: torch keeps a
descriptor that it may wait for and close, and the socket is gone. This takes no privilege.
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

# The two ends of a connection, the own one first: addresses with their ports.
_Ends: TypeAlias = tuple[str, str]
_CREDENTIALS = struct.Struct("iII")  # of unix(7): pid, uid, gid
_MAPPED = "::ffff:"  # an IPv4 address, as IPv6 writes it


@contextmanager
def closed_after(store: dist.Store, rank: int, world_size: int) -> Iterator[None]:
    """At the end, close every socket that this process has begun to listen on meanwhile to strangers.

    Connections of members stay; every member of the group leaves such a block, once all are connected.

    Args:
        store: in which nobody else writes, with names that are used once.
        rank, world_size: of this process in the group.
    """
    with _sockets() as before:
        known = {inode for inode, each in before.items() if _is_listening(each)}
    yield
    with _sockets() as now:
        listeners = {inode: each for inode, each in now.items() if inode not in known and _is_listening(each)}
        places = {_place(each) for each in listeners.values()}
        own = [ends for each in now.values() if (ends := _ends(each))]
    _close(listeners.keys())
    store.set(f"connections/{rank}", json.dumps(own))
    members = {
        (there, here)
        for each in range(world_size)
        for here, there in json.loads(store.get(f"connections/{each}"))
    }
    # Only now: what was being accepted when its listener was closed is there by now, too.
    with _sockets() as now:
        for each in now.values():
            if _is_of_a_stranger(each, places, members):
                with suppress(OSError):  # it has gone by itself
                    each.shutdown(socket.SHUT_RDWR)


def is_own_user(each: socket.socket) -> bool:
    """Whether the other end of a connection of AF_UNIX is a process of this one's user."""
    credentials = each.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


@contextmanager
def _sockets() -> Iterator[dict[int, socket.socket]]:
    """This process's sockets, by inode: copies, since others may close theirs meanwhile."""
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


def _place(each: socket.socket) -> int | str | bytes:
    """What a listener shares with the connections that it has accepted: a port, or a name in the system."""
    address: tuple[str, int] | str | bytes = each.getsockname()
    return address[1] if isinstance(address, tuple) else address


def _ends(each: socket.socket) -> _Ends | None:
    """The ends of a connection between hosts; None where it is none."""
    if each.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        return _end(each.getsockname()), _end(each.getpeername())
    except OSError:  # not connected
        return None


def _end(address: tuple[str, int]) -> str:
    return f"{address[0].removeprefix(_MAPPED)} {address[1]}"


def _is_of_a_stranger(each: socket.socket, places: set[int | str | bytes], members: set[_Ends]) -> bool:
    """Whether a socket was accepted by a listener at one of ``places``, and its other end is no member's."""
    if _is_listening(each) or _place(each) not in places:
        return False
    if each.family == socket.AF_UNIX:
        return not is_own_user(each)
    return _ends(each) not in members


def _close(inodes: Iterable[int]) -> None:
    """Close sockets of which others hold the descriptors; these remain, and wait for nothing."""
    wanted, waiting = set(inodes), _waiting()
    for number in list(_descriptors()):
        with suppress(OSError):  # closed meanwhile
            if os.fstat(number).st_ino in wanted:
                _replace(number, waiting[number])


def _replace(number: int, waiting: Iterable[tuple[int, int]]) -> None:
    silent = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        os.dup2(silent, number, inheritable=False)
    finally:
        os.close(silent)
    # Where the socket was waited for, so is its successor, until its owner says that it is not.
    for poll, events in waiting:
        with select.epoll.fromfd(os.dup(poll)) as epoll:
            epoll.register(number, events)


def _waiting() -> dict[int, list[tuple[int, int]]]:
    """By descriptor, those of the epoll instances that wait for it, and for which events; see proc(5)."""
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

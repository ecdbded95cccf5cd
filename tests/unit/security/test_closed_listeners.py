"""Listening sockets that are closed once all members of a group are connected."""

import errno
import os
import select
import socket
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from support.users import connected_as_another_user

from hybrid.security.closed_listeners import close_listeners_after

SECONDS = 5.0


def closed() -> AbstractContextManager[None]:
    """Return the context in a group of this process only: its own connections are those of members."""
    return close_listeners_after(dist.HashStore(), 0, 1)


def listening(address: object = ("127.0.0.1", 0), family: int = socket.AF_INET) -> socket.socket:
    made = socket.socket(family)
    made.bind(address)  # type: ignore[arg-type]
    made.listen()
    made.settimeout(SECONDS)
    return made


def accept(listener: socket.socket) -> socket.socket:
    accepted, _ = listener.accept()
    accepted.settimeout(SECONDS)
    return accepted


def is_open(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, SECONDS).close()
    except ConnectionRefusedError:
        return False
    return True


@contextmanager
def stranger(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has connected; it ends when its connection does."""
    process = subprocess.Popen(["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port} && cat <&3"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def check_talking(one: socket.socket, other: socket.socket) -> None:
    for sender, receiver in ((one, other), (other, one)):
        sender.sendall(b"still here")
        assert receiver.recv(100) == b"still here"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_only_connections_of_members_stay(family: socket.AddressFamily) -> None:
    """Also if the listener accepts IPv4 as mapped IPv6 addresses, as torch's listeners do."""
    host = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::"}[family]
    with ExitStack() as stack:
        with closed():
            listener = stack.enter_context(listening((host, 0), family))
            port = listener.getsockname()[1]
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
            served = stack.enter_context(accept(listener))
            other = stack.enter_context(stranger(port))
            accepted = stack.enter_context(accept(listener))
        check_talking(client, served)
        assert accepted.recv(1) == b""
        assert other.wait(SECONDS) == 0
        assert not is_open(("127.0.0.1", port))


def test_connections_in_the_backlog_are_closed() -> None:
    with ExitStack() as stack:
        with closed():
            listener = stack.enter_context(listening())
            other = stack.enter_context(stranger(listener.getsockname()[1]))
            assert select.select([listener], [], [], SECONDS)[0]
        assert other.wait(SECONDS) is not None


def test_other_listeners_stay_open_with_their_connections() -> None:
    with listening() as before:
        with stranger(before.getsockname()[1]) as other, accept(before) as served:
            with closed(), listening():
                pass
            served.sendall(b"still here")
            assert other.poll() is None
        with listening() as after:
            assert is_open(before.getsockname())
            assert is_open(after.getsockname())


def test_a_unix_listener_is_closed(tmp_path: Path) -> None:
    name = str(tmp_path / "socket")
    with ExitStack() as stack:
        member, late = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        member.settimeout(SECONDS)
        with closed():
            listener = stack.enter_context(listening(name, socket.AF_UNIX))
            member.connect(name)
            served = stack.enter_context(accept(listener))
        check_talking(member, served)
        with pytest.raises(ConnectionRefusedError):
            late.connect(name)


@pytest.mark.root
def test_a_unix_connection_of_another_user_is_closed() -> None:
    name = b"\0hybrid test " + os.urandom(8).hex().encode()
    with ExitStack() as stack:
        with closed():
            listener = stack.enter_context(listening(name, socket.AF_UNIX))
            other = stack.enter_context(connected_as_another_user(name))
            accepted = stack.enter_context(accept(listener))
        assert accepted.recv(1) == b""
        assert other.wait(SECONDS) == 0


def test_epoll_of_a_closed_listener_reports_nothing() -> None:
    """An event would keep torch's threads busy, and a failure to unregister would end the process."""
    with select.epoll() as epoll:
        with closed():
            listener = listening()
            epoll.register(listener, select.EPOLLIN)
            number = listener.fileno()
        assert epoll.poll(0.01) == []
        listener.setblocking(False)
        with pytest.raises(OSError, match=os.strerror(errno.ENOTSOCK)):
            listener.accept()
        epoll.unregister(number)
        listener.close()


def test_no_descriptor_is_left_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with closed():
        listener = listening()
    listener.close()
    assert len(os.listdir("/proc/self/fd")) == before

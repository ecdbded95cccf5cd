"""Sockets that let nobody in once those have come whom they are for."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hybrid.trust.sockets import sealed_after

SECONDS = 0.3


def listening(address: object = ("127.0.0.1", 0), family: int = socket.AF_INET) -> socket.socket:
    made = socket.socket(family)
    made.bind(address)  # type: ignore[arg-type]
    made.listen()
    return made


def is_open(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, SECONDS).close()
    except OSError:
        return False
    return True


def test_who_has_connected_stays_and_nobody_else_comes() -> None:
    with sealed_after():
        listener = listening()
        address = listener.getsockname()
        client = socket.create_connection(address, SECONDS)
        served, _ = listener.accept()
    with listener, client, served:
        assert not is_open(address)
        for sender, receiver in ((client, served), (served, client)):
            receiver.settimeout(5.0)
            sender.sendall(b"still here")
            assert receiver.recv(100) == b"still here"


def test_sockets_of_before_and_after_stay_open() -> None:
    with listening() as before:
        with sealed_after():
            pass
        with listening() as after:
            assert is_open(before.getsockname())
            assert is_open(after.getsockname())


def test_a_socket_with_a_name_instead_of_a_port_is_sealed(tmp_path: Path) -> None:
    name = str(tmp_path / "socket")
    with sealed_after():
        listener = listening(name, socket.AF_UNIX)
    with listener, socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(name)


def test_where_the_start_has_failed_nothing_is_sealed() -> None:
    started: list[socket.socket] = []

    def fail_to_start() -> None:
        with sealed_after():
            started.append(listening())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_to_start()
    with started[0]:
        assert is_open(started[0].getsockname())


def test_no_descriptor_is_left_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with sealed_after():
        listener = listening()
    listener.close()
    assert len(os.listdir("/proc/self/fd")) == before

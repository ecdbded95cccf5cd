"""A master that is stopped before a role has met it: the system takes connections for it, nobody answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from support.commands import ROOT, eventually, free_port
from support.rendezvous import ADDRESS, SECONDS, meeting

from hybrid.config import ClusterSection
from hybrid.errors import ClusterError
from hybrid.trust.secret import Secret
from workers.joining.bootstrap import _connect
from workers.joining.channel import GREETING, KEY_BYTES, LARGEST_FRAME, PROOF_BYTES
from workers.joining.listener import listen
from workers.joining.rhythm import Rhythm

TIMEOUT = 0.3
FROZEN = rf"^the master is frozen: no sign of life for {TIMEOUT} s \(cluster.heartbeat_timeout_seconds\)$"


@contextmanager
def stopped_after(said: bytes) -> Iterator[int]:
    """The port of somebody who says this to the first who comes, and then nothing to anybody."""

    def greet() -> None:
        connections.append(listener.accept()[0])
        connections[0].sendall(said)

    connections: list[socket.socket] = []
    with listen(ADDRESS, 0) as listener:
        listener.settimeout(SECONDS)
        if said:
            threading.Thread(target=greet).start()
        yield listener.getsockname()[1]
        for connection in connections:
            connection.close()


@pytest.mark.parametrize(
    "said",
    [b"", GREETING[:3], GREETING, GREETING + os.urandom(KEY_BYTES)],
    ids=["nothing", "half a greeting", "no nonce", "no proof"],
)
def test_one_who_is_there_and_silent_is_frozen_after_the_timeout(said: bytes) -> None:
    with stopped_after(said) as port:
        section = ClusterSection(master_address=ADDRESS, master_port=port)
        began = time.monotonic()
        with pytest.raises(ClusterError, match=FROZEN):
            _connect(section, Secret.fresh(), Rhythm(TIMEOUT))
        assert 0.9 * TIMEOUT < time.monotonic() - began < 10 * TIMEOUT


def test_one_who_takes_no_message_is_frozen_after_the_timeout() -> None:
    with meeting(TIMEOUT) as opened:
        channel = opened.channel()
        channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with opened.frozen():
            began = time.monotonic()
            with pytest.raises(ClusterError, match=FROZEN):
                channel.send(bytes(LARGEST_FRAME // 2))
            assert 0.9 * TIMEOUT < time.monotonic() - began < 10 * TIMEOUT
        channel.close()


def test_one_who_is_not_there_yet_is_waited_for_however_short_the_timeout() -> None:
    port = free_port()
    section = ClusterSection(master_address=ADDRESS, master_port=port, start_timeout_seconds=0.2)
    with pytest.raises(ClusterError, match=rf"^no master at {ADDRESS}:{port} after 0.2 s \(\[Errno 111\]"):
        _connect(section, Secret.fresh(), Rhythm(0.01))


def test_a_role_that_was_stopped_itself_waits_anew() -> None:
    """Master and role were stopped, as by a pause of their host, and the master goes on a little later."""
    timeout = 1.0
    program = (
        "import sys; from hybrid.trust.secret import Secret; from workers.joining.channel import Channel; "
        "from workers.joining.rhythm import Rhythm; "
        f"Channel({ADDRESS!r}, int(sys.argv[1]), Secret.fresh(), Rhythm({timeout}))"
    )
    with listen(ADDRESS, 0) as listener:
        listener.settimeout(SECONDS)
        command = [sys.executable, "-c", program, str(listener.getsockname()[1])]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as role:
            with listener.accept()[0] as connection:
                waiting = psutil.Process(role.pid)
                assert eventually(lambda: waiting.status() == psutil.STATUS_SLEEPING, SECONDS)
                role.send_signal(signal.SIGSTOP)
                time.sleep(1.1 * timeout)
                role.send_signal(signal.SIGCONT)
                time.sleep(0.1 * timeout)
                connection.sendall(GREETING + bytes(KEY_BYTES + PROOF_BYTES))
                _, said = role.communicate(timeout=SECONDS)
    assert "has another secret" in said

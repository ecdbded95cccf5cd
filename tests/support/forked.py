"""Functions that the processes of a fork server run in tests.

The server passes the last two arguments: a listening socket and a function that reports to the launcher.
"""

import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

from workers.launching.fork_server import ForkServer, ProcessEnd

SECONDS = 10.0


def send(text: str, listener: socket.socket, report: Callable[[object], None]) -> None:
    report(text)


def exit_with(code: int, *_: object) -> None:
    sys.exit(code)


def fail(*_: object) -> None:
    raise ValueError("expected")


def pause(*_: object) -> None:
    signal.pause()


def freeze(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def connect(port: int | None, listener: socket.socket, *_: object) -> None:
    """Fail if nothing listens on a port of loopback; None means the port of ``listener``."""
    socket.create_connection(("127.0.0.1", port or listener.getsockname()[1]), SECONDS).close()


def check_user(user: int, group: int, *_: object) -> None:
    """Fail if this process has another user or group."""
    assert (os.geteuid(), os.getegid()) == (user, group)


def end_of(server: ForkServer, target: Callable[..., None], *args: object) -> ProcessEnd:
    """Run ``target(*args)`` in a process of the server, and return its end."""
    server.start(target, {"one": args})
    ended = server.event(SECONDS)
    assert ended is not None
    assert ended.name == "one"
    return ended


def launch_and_wait(targets: Sequence[str]) -> None:
    """Start these functions of this module as a launcher, print their pids, and wait to be killed."""
    module = importlib.import_module("support.forked")  # this one is __main__, which the server has not
    with ForkServer(["support.forked"]) as server:
        pids = [server.start(getattr(module, target), {target: ()})[target] for target in targets]
        print(*pids, flush=True)
        time.sleep(SECONDS)


if __name__ == "__main__":
    launch_and_wait(sys.argv[1:])

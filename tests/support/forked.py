"""What the processes do that the tests of the fork server start."""

import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

from workers.launching.fork_server import Ended, ForkServer, Started

SECONDS = 10.0


def write(text: str, descriptor: int) -> None:
    os.write(descriptor, text.encode())


def exit_with(code: int) -> None:
    sys.exit(code)


def fail() -> None:
    raise ValueError("as it should")


def pause() -> None:
    signal.pause()


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def connect(port: int) -> None:
    """Fail where nothing listens on this port of loopback."""
    socket.create_connection(("127.0.0.1", port), SECONDS).close()


def be(user: int, group: int) -> None:
    """Fail where this process is somebody else."""
    assert (os.geteuid(), os.getegid()) == (user, group)


def exit_code(server: ForkServer, target: Callable[..., None], *args: object) -> int:
    """How a process of the server ends that runs ``target(*args)``."""
    server.start("one", target, args, [])
    assert isinstance(server.event(SECONDS), Started)
    ended = server.event(SECONDS)
    assert isinstance(ended, Ended)
    assert ended.name == "one"
    return ended.exit_code


def launch_and_wait(targets: Sequence[str]) -> None:
    """Be a launcher: start these functions of this module, print their pids, and wait to be killed."""
    module = importlib.import_module("support.forked")  # this one is __main__, which the server has not
    with ForkServer(["support.forked"]) as server:
        for target in targets:
            server.start(target, getattr(module, target), (), [])
        pids = [event.pid for _ in targets if isinstance(event := server.event(SECONDS), Started)]
        print(*pids, flush=True)
        time.sleep(SECONDS)


if __name__ == "__main__":
    launch_and_wait(sys.argv[1:])

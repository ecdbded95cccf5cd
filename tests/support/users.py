"""Other users of the machine, for tests that need one."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def connected_as_another_user(name: bytes) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of another user that connects to a Unix socket; it ends with its connection."""
    connect = f"s = socket.socket(1); s.connect({name!r}); print(flush=True); s.recv(1)"
    command = ["/usr/bin/env", "python3", "-Sc", f"import os, socket; os.setuid(1); {connect}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()

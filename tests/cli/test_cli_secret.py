"""The secret: the command that makes it, peers without it, and that it is never visible."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from support.commands import (
    DOING,
    ONE_EACH,
    OTHERS,
    TRAINER,
    WORKER,
    by_hand,
    eventually,
    fresh_secret,
    run,
    settings,
    started,
)

from hybrid.security.secret import VARIABLE
from workers.cli import main

HEARTBEAT_SECONDS = 2.0
STOP_SECONDS = 5.0


@pytest.fixture
def one_each(endless: list[str]) -> list[str]:
    """Settings of a cluster with one trainer and one worker, which trains until it is stopped."""
    return [*endless, *ONE_EACH, *settings(cluster={"heartbeat_timeout_seconds": HEARTBEAT_SECONDS})]


def test_secret_command_writes_a_private_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "secret"
    main(["secret", str(file)])
    assert file.stat().st_mode & 0o777 == 0o600
    printed = capsys.readouterr().out
    assert f"--set cluster.secret_file={file}\n" in printed
    assert f'export {VARIABLE}="$(cat {file})"\n' in printed
    assert file.read_text().strip() not in printed
    with pytest.raises(SystemExit, match="File exists"):
        main(["secret", str(file)])


def check_not_visible(process: psutil.Process, secret: str) -> None:
    assert secret not in " ".join(process.cmdline())
    assert secret not in " ".join(f"{key}={value}" for key, value in process.environ().items())


def disturb(port: int) -> None:
    """Send bytes to the rendezvous as an unauthenticated peer, and keep connections open."""
    for payload in (b"", os.urandom(64), bytes(64), b"\xff" * 100_000, os.urandom(31)):
        with socket.create_connection(("127.0.0.1", port), timeout=STOP_SECONDS) as connection:
            connection.sendall(payload)
    for _ in range(3):
        socket.create_connection(("127.0.0.1", port), timeout=STOP_SECONDS).detach()


@pytest.mark.long
def test_unauthenticated_peers_disturb_no_run_and_a_frozen_role_is_reported(
    one_each: list[str], tmp_path: Path
) -> None:
    with by_hand([["master"], TRAINER, WORKER], one_each, tmp_path, afresh=True) as (master, trainer, worker):
        master.await_step()
        secret = (tmp_path / "secret").read_text().strip()
        for command in (master, trainer, worker):
            check_not_visible(psutil.Process(command.process.pid), secret)
        (port,) = re.findall(
            r"cluster.master=127.0.0.1:(\d+)", " ".join(psutil.Process(master.process.pid).cmdline())
        )
        disturb(int(port))
        other = [*TRAINER, "--master", f"127.0.0.1:{port}"]
        refused = run([*other, *fresh_secret(tmp_path / OTHERS)], tmp_path)
        assert refused.code == 1
        assert f"the master at 127.0.0.1:{port} has another secret" in refused.stderr
        step = master.stdout.count("\nstep ")
        assert eventually(lambda: master.stdout.count("\nstep ") > step + 5, STOP_SECONDS)

        began = time.monotonic()
        worker.process.send_signal(signal.SIGSTOP)
        of_trainer, of_master = trainer.wait(STOP_SECONDS), master.wait(STOP_SECONDS)
        assert time.monotonic() - began < HEARTBEAT_SECONDS + 1
        assert (of_trainer.code, of_master.code) == (75, 75)
        reason = (
            rf"worker 0 \(host \S+, pid {worker.process.pid}\) is frozen: no heartbeat for 2 s "
            rf"\(cluster.heartbeat_timeout_seconds\) {DOING}; its log may have the cause\n"
        )
        refusals = r"(.* WARNING hybrid\S+ rejected a connection: .*, from 127.0.0.1 .*\n)+"
        assert re.fullmatch(f"{refusals}hybrid master: {reason}", of_master.stderr), of_master.stderr
        assert re.fullmatch(f"hybrid trainer 0: stopped by the master: {reason}", of_trainer.stderr), (
            of_trainer.stderr
        )
        worker.process.send_signal(signal.SIGCONT)
        # Either message may arrive first.
        late = worker.wait(STOP_SECONDS).stderr
        pattern = r"hybrid worker 0: (the master went away|stopped by the master): .+\n"
        assert re.fullmatch(pattern, late), late


def test_secret_of_launch_is_in_no_argument_variable_or_file(one_each: list[str], tmp_path: Path) -> None:
    file = tmp_path / "secret"
    main(["secret", str(file)])
    secret = file.read_text().strip()
    overrides = settings(cluster={"secret_file": file}, run={"folder": "run"})
    with started(["launch", *one_each, *overrides], tmp_path, afresh=True) as command:
        command.await_step()
        processes = command.processes()
        assert len(processes) >= 4
        for process in processes:
            check_not_visible(process, secret)
        command.process.send_signal(signal.SIGTERM)
        command.wait(STOP_SECONDS)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != file]
    assert written
    assert [path for path in written if secret.encode() in path.read_bytes()] == []

"""The secret: the command that makes it, and that it is never visible."""

import signal
from pathlib import Path

import pytest
from support.commands import ONE_EACH, settings, started

from hybrid.security.secret import VARIABLE
from workers.cli import main

STOP_SECONDS = 5.0


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


def test_secret_of_launch_is_in_no_argument_variable_or_file(endless: list[str], tmp_path: Path) -> None:
    file = tmp_path / "secret"
    main(["secret", str(file)])
    secret = file.read_text().strip()
    overrides = settings(cluster={"secret_file": file}, run={"folder": "run"})
    with started(["launch", *endless, *ONE_EACH, *overrides], tmp_path, afresh=True) as command:
        command.await_step()
        processes = command.processes()
        assert len(processes) >= 4
        for process in processes:
            assert secret not in " ".join(process.cmdline())
            assert secret not in " ".join(f"{key}={value}" for key, value in process.environ().items())
        command.process.send_signal(signal.SIGTERM)
        command.wait(STOP_SECONDS)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != file]
    assert written
    assert [path for path in written if secret.encode() in path.read_bytes()] == []

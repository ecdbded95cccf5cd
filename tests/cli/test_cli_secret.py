"""The command that makes a secret."""

from pathlib import Path

import pytest

from hybrid.security.secret import VARIABLE
from workers.cli import main


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

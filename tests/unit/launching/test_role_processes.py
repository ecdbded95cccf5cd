"""What the process of a role does under the launcher before it ends."""

import resource
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from support.fork_context import fork_context

from hybrid.config import ClusterSection, RunConfig
from hybrid.security.secret import Secret
from hybrid.topology import MASTER
from workers.cluster_task import ScriptTask
from workers.console.messages import Verbosity
from workers.exit_codes import Cause, ExitCode
from workers.launching.role_failure import RoleFailure
from workers.launching.role_processes import _role_main
from workers.rendezvous.master_address import listen
from workers.run_folder.run_paths import log_path

SECONDS = 60.0
STARTLESS = RunConfig(cluster=ClusterSection(interface="none0"))  # a master ends at once on it
TASK = ScriptTask("train.py", ())


def _be_a_role(told: Connection, folder: Path, most_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))  # as a full disk, but for the words
    with listen("127.0.0.1", 0) as listener:
        secret, descriptors = Secret.fresh(), (told.fileno(), 0, listener.fileno())
        _role_main(MASTER, STARTLESS, folder, TASK, secret, Verbosity.NORMAL, *descriptors)


def ended_role(folder: Path, most_bytes: int = 1 << 20) -> tuple[int, Sequence[RoleFailure]]:
    """Exit code of a role whose files take so many bytes, and what it tells the launcher."""
    context = fork_context()
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_be_a_role, args=(writer, folder, most_bytes))
    process.start()
    writer.close()
    process.join(SECONDS)
    return process.exitcode or 0, [reader.recv()] if reader.poll() else []


@pytest.mark.parametrize("most_bytes", [1 << 20, 0], ids=["there is room", "no room in its log"])
def test_it_tells_its_error(most_bytes: int, tmp_path: Path) -> None:
    log = log_path(tmp_path, MASTER)
    log.parent.mkdir()
    code, (told,) = ended_role(tmp_path, most_bytes)
    assert (code, told.cause) == (ExitCode.FAILED, Cause.REFUSED)
    assert told.message.startswith("cluster.interface = 'none0': this host has ")
    assert ("Traceback" in log.read_text()) == bool(most_bytes)


def test_it_says_that_it_can_have_no_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, (told,) = ended_role(tmp_path)
    what_to_do = "free space there, or set run.folder to another folder"
    log = log_path(tmp_path, MASTER)
    assert told.message == f"{log}: cannot be written: No such file or directory; {what_to_do}"
    assert (code, told.cause) == (ExitCode.FAILED, Cause.REFUSED)
    assert capfd.readouterr().err == ""

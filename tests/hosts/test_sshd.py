"""configs/cluster/hosts.sh with OpenSSH, on two hosts that each run a server."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.commands import HYBRID, ROOT, Command, eventually, settings, start_process
from support.host_roles import Progress
from support.hosts import Host
from support.namespaces import needs_hosts

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [
    needs_hosts,
    pytest.mark.skipif(SSHD is None or not shutil.which("ssh"), reason="needs OpenSSH, its server too"),
    pytest.mark.long,
]
SECONDS = 200.0
SERVER = """HostKey {folder}/server
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PidFile none
SetEnv XDG_STATE_HOME=/tmp/home/state PYTHONPATH={root}
"""
CLIENT = """IdentityFile {folder}/user
IdentitiesOnly yes
UserKnownHostsFile {folder}/known
GlobalKnownHostsFile /dev/null
BatchMode yes
LogLevel ERROR
"""
LISTEN = "mount -t tmpfs tmpfs /run && mkdir /run/sshd && exec {sshd} -f {folder}/server.conf"


@pytest.fixture
def listening(hosts: list[Host], shared: Path) -> Iterator[tuple[list[Host], Path]]:
    """Two hosts with an ssh server, and the folder with keys and configurations."""
    pair, folder = hosts[:2], Path(tempfile.mkdtemp(dir=shared))
    for name in ("server", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "server.conf").write_text(SERVER.format(folder=folder, root=ROOT))
    (folder / "client.conf").write_text(CLIENT.format(folder=folder))
    (folder / "known").write_text(
        f"{','.join(host.name for host in pair)} {(folder / 'server.pub').read_text()}"
    )
    for host in pair:
        host.run("sh", "-c", LISTEN.format(sshd=SSHD, folder=folder))
    yield pair, folder
    for host in pair:
        for process in sessions(host):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        host.run("umount", "/run")


def sessions(host: Host) -> list[psutil.Process]:
    """Return the ssh server of a host and its connections."""
    return [each for each in host.processes() if each.name() == "sshd"]


def hosts_sh(pair: list[Host], folder: Path, arguments: list[str], output: Path) -> Command:
    """Run hosts.sh on the first host: master and trainer on it, trainer and worker on the second."""
    first, second = (host.name for host in pair)
    script = ["bash", str(ROOT / "configs/cluster/hosts.sh"), first, f"{first} {second}", second, *arguments]
    variables = {"SSH": f"ssh -F {folder}/client.conf", "HYBRID": " ".join(HYBRID)}
    environment = pair[0].environment(variables)
    return Command(start_process([*pair[0].entering, *script], environment, output), output)


def test_broken_connection_restarts_and_a_stop_saves(
    listening: tuple[list[Host], Path], tiny: list[str], shared: Path, tmp_path: Path
) -> None:
    pair, folder = listening
    run = shared / "sshd-run"
    more = settings(run={"folder": run}, train={"epochs": 1_000_000}, checkpoint={"every_steps": 5})
    script = hosts_sh(pair, folder, [*tiny, *more], tmp_path / "output")
    try:
        progress = Progress(run, [script])
        progress.await_checkpoint()
        servers = {host.name: min(sessions(host), key=psutil.Process.create_time) for host in pair}
        for each in sessions(pair[1]):
            if each != servers[pair[1].name]:
                each.kill()
        assert eventually(lambda: "resuming from step" in script.stdout, SECONDS)
        progress.await_checkpoint()
        (bash,) = psutil.Process(script.process.pid).children()
        bash.send_signal(signal.SIGINT)
        ended = script.wait(SECONDS)
    finally:
        script.kill()
    assert ended.code == 143, ended.stderr
    assert ended.stderr.count("hosts.sh: ended with 255; restarting in 5 s") == 1, ended.stderr
    assert eventually(lambda: all(len(host.processes()) == 1 for host in pair), SECONDS), (
        "only the ssh servers are left"
    )

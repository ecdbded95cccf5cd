"""configs/cluster/hosts.sh on two hosts with a fake ssh: roles and hosts are killed."""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from chaos_run.run_comparison import differences
from support.commands import HYBRID, ROOT, Command, eventually, output_of, settings, start_process
from support.host_roles import Progress, process_on
from support.hosts import HOME, Host, Switch
from support.namespaces import needs_hosts

pytestmark = [needs_hosts, pytest.mark.long, pytest.mark.timeout(1000)]

SECONDS = 300.0
COUNTS = {"trainers": 2, "workers": 2}
# A fake ssh: a shell on the host of the first argument runs a line. It waits for a host that restarts.
SSH = """host=$1; shift
until [ -e "{folder}/$host" ]; do sleep 0.1; done
. "{folder}/$host"
"""
ENTER = 'exec {entering} env -i {environment} sh -c "$*"\n'


def let_enter(host: Host, folder: Path) -> None:
    """Let the fake ssh enter a host, such as a restarted one."""
    environment = {"HOME": HOME, "PATH": os.environ["PATH"], "PYTHONPATH": ROOT}
    words = shlex.join(f"{name}={value}" for name, value in environment.items())
    script = folder / f"{host.name}.new"
    script.write_text(ENTER.format(entering=shlex.join(host.entering), environment=words))
    script.rename(folder / host.name)


@contextmanager
def hosts_sh(hosts: list[Host], arguments: list[str], folder: Path) -> Iterator[Command]:
    """Run hosts.sh: master and a trainer on the first host, a trainer and two workers on the second."""
    for host in hosts:
        let_enter(host, folder)
    (folder / "ssh").write_text(SSH.format(folder=folder))
    first, second = (host.name for host in hosts)
    script = ["bash", str(ROOT / "configs/cluster/hosts.sh")]
    script += [first, f"{first} {second}", f"{second} {second}", *arguments]
    commands = {"SSH": f"bash {folder}/ssh", "HYBRID": " ".join(HYBRID), "PYTHONPATH": str(ROOT)}
    output = folder / "output"
    command = Command(start_process(script, {**os.environ, **commands}, output), output)
    try:
        yield command
    finally:
        command.kill()


def role_on(hosts: list[Host], *words: str) -> psutil.Process:
    """Return the process of a role by the first words of its command."""
    begins = [*HYBRID[1:], *words]
    return process_on(hosts, lambda process: bool(process.cmdline()[1 : len(begins) + 1] == begins))


def test_killed_role_and_host_are_restarted(
    hosts: list[Host], switch: Switch, tiny: list[str], shared: Path, tmp_path: Path
) -> None:
    """The script restarts all roles each time, and the run has the bits of an undisturbed one."""
    job = [*tiny, *settings(train={"epochs": 12}, checkpoint={"every_steps": 5}, cluster=COUNTS)]
    job += settings(cluster={"start_timeout_seconds": 250})
    run, whole = shared / "ssh", shared / "ssh-whole"
    output_of(["launch", *job, *settings(run={"folder": whole})], tmp_path)
    with hosts_sh(hosts[:2], [*job, *settings(run={"folder": run})], tmp_path) as script:
        progress = Progress(run, [script])
        progress.await_checkpoint()
        role_on(hosts, "worker", "--index", "1").kill()
        progress.await_checkpoint()
        (tmp_path / hosts[1].name).unlink()
        hosts[1].kill()
        hosts[1] = switch.host(shared, number=1)
        let_enter(hosts[1], tmp_path)
        progress.await_checkpoint()
        ended = script.wait(SECONDS)
    assert ended.code == 0, ended.stderr
    assert ended.stderr.count("restarting") == 2
    assert differences(whole, run) == []
    assert eventually(lambda: not any(host.processes() for host in hosts), SECONDS)

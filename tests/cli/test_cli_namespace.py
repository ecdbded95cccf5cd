"""The network namespace of the roles that ``launch`` starts."""

import os
import subprocess
from pathlib import Path

import psutil
import pytest
from support.commands import COMMAND_SECONDS, HYBRID, ROOT, started
from support.namespaces import needs_namespaces

# Docker's default profile and some distributions forbid namespaces.
FORBID = 'echo 0 >/proc/sys/user/max_net_namespaces && exec "$@"'


def network_of(process: psutil.Process | None = None) -> int:
    return os.stat(f"/proc/{process.pid if process else 'self'}/ns/net").st_ino


@needs_namespaces
def test_roles_share_a_private_network(endless: list[str], tmp_path: Path) -> None:
    with started(["launch", *endless], tmp_path) as command:
        command.await_step()
        networks = {network_of(command.role(name)) for name in ("master", "trainer 1", "worker 0")}
    assert len(networks) == 1
    assert network_of() not in networks


@needs_namespaces
@pytest.mark.long
def test_run_without_a_namespace_warns_of_open_ports(tiny: list[str], tmp_path: Path) -> None:
    ended = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", FORBID, "sh", *HYBRID, "launch", *tiny],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
    )
    assert ended.returncode == 0
    assert ended.stderr.startswith("hybrid launch: no network namespace (No space left on device): ")
    assert "cluster.namespace" in ended.stderr
    assert ended.stderr.count("\n") == 1

"""Namespaces of the system, for tests that need one."""

import subprocess
from functools import cache

import pytest
from support.first_process import hosts_refused


@cache
def _is_allowed() -> bool:
    ways = (["--net"], ["--net", "--user", "--map-current-user"])
    return any(subprocess.run(["unshare", *way, "true"], capture_output=True).returncode == 0 for way in ways)


needs_namespaces = pytest.mark.skipif(
    not _is_allowed(), reason="needs user and network namespaces, which this system does not allow"
)
needs_hosts = pytest.mark.skipif(bool(hosts_refused()), reason=hosts_refused())

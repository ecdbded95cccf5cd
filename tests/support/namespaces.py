"""Namespaces of the system, for tests that need one."""

import subprocess
from functools import cache

import pytest


@cache
def _is_allowed() -> bool:
    ways = (["--net"], ["--net", "--user", "--map-current-user"])
    return any(subprocess.run(["unshare", *way, "true"], capture_output=True).returncode == 0 for way in ways)


needs_namespaces = pytest.mark.skipif(
    not _is_allowed(), reason="needs user and network namespaces, which this system does not allow"
)

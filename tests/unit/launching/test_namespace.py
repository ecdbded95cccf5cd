"""When a launch uses a network namespace, and how a refused one is handled."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hybrid.config import ClusterSection, DataSection, RunConfig, TableSection
from hybrid.storage.remote_path import parse_path
from workers.launching.fork_server import enter_network_namespace
from workers.launching.launcher import namespace_hint, uses_namespace

HERE = Path("runs/a")


@pytest.mark.parametrize(
    "keys", [{}, *({"master": each} for each in ("localhost", "127.3.2.1", "::1"))], ids=str
)
def test_namespace_is_used_if_all_connections_stay_on_loopback(keys: dict[str, Any]) -> None:
    assert uses_namespace(RunConfig(cluster=ClusterSection(**keys)), HERE)


@pytest.mark.parametrize(
    "section",
    [
        {"cluster": ClusterSection(master="10.0.0.1")},
        {"cluster": ClusterSection(master="node0")},
        {"cluster": ClusterSection(interface="eth0")},
        {"cluster": ClusterSection(namespace="off")},
        {"cluster": ClusterSection(loggers=("tensorboard", "my_module:Logger"))},
        {"data": DataSection(cache_folder="s3://bucket/prepared")},
        {"data": DataSection(format="csv", path=("a.csv", "gs://bucket/b.csv"))},
        {"data": DataSection(format="csv", path=("a.csv",), test_path=("abfs://bucket/b.csv",))},
        {"data": DataSection(path=("a.csv",), joins=("table('s3://bucket/b.csv', key = 'item')",))},
        {"tables": {"item": TableSection(), "user": TableSection(initial="s3://bucket/rows.npy")}},
    ],
    ids=str,
)
def test_other_hosts_and_stores_need_the_network_of_the_machine(section: dict[str, Any]) -> None:
    assert not uses_namespace(RunConfig(**section), HERE)
    assert not uses_namespace(RunConfig(), parse_path("s3://bucket/runs/copy"))


def test_refused_namespace_leaves_process_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process tries it first, since a namespace cannot be left."""
    before = os.readlink("/proc/self/ns/net")
    monkeypatch.setattr(os, "fork", lambda: 1 << 22)
    monkeypatch.setattr(os, "waitpid", lambda pid, options: (pid, errno.EPERM << 8))
    with pytest.raises(PermissionError):
        enter_network_namespace()
    assert os.readlink("/proc/self/ns/net") == before


@pytest.mark.parametrize(
    ("failure", "has_hint"),
    [
        ("trainer 0: OSError: [Errno 101] Network is unreachable", True),
        ("trainer 0: gaierror: [Errno -3] Temporary failure in name resolution", True),
        ("trainer 0: OSError: curlCode: 6, Could not resolve hostname", True),
        ("trainer 0: ValueError: shapes differ", False),
    ],
)
def test_failures_for_want_of_a_network_name_the_remedy(failure: str, has_hint: bool) -> None:
    assert ('cluster.namespace = "off"' in namespace_hint(failure)) == has_hint

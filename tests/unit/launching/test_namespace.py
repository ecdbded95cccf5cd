"""A network of their own for what a launch starts: when, and what is in it."""

import dataclasses
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import forked
from support.namespaces import needs_namespaces

from hybrid.config import ClusterSection, DataSection, RunConfig, TableSection
from hybrid.config.sections import RunSection
from hybrid.errors import ConfigError
from hybrid.storage.remote_path import parse_path
from workers.launching import network_namespace
from workers.launching.fork_server import ForkServer

SECONDS = forked.SECONDS
HERE = Path("runs/a")


@pytest.mark.parametrize(
    ("keys", "is_wanted"),
    [
        ({}, True),
        ({"master": "localhost"}, True),
        ({"master": "127.3.2.1"}, True),
        ({"master": "::1"}, True),
        ({"master": "10.0.0.1"}, False),
        ({"master": "node0"}, False),
        ({"interface": "eth0"}, False),
        ({"namespace": "off"}, False),
    ],
    ids=str,
)
def test_it_is_wanted_where_loopback_is_all_that_is_needed(keys: dict[str, Any], is_wanted: bool) -> None:
    section = dataclasses.replace(ClusterSection(), **keys)
    assert network_namespace.is_wanted(RunConfig(cluster=section), HERE) == is_wanted


@pytest.mark.parametrize(
    "section",
    [
        {"data": DataSection(cache_folder="s3://bucket/prepared")},
        {"data": DataSection(format="csv", path=("a.csv", "gs://bucket/b.csv"))},
        {"data": DataSection(format="csv", path=("a.csv",), test_path=("abfs://bucket/b.csv",))},
        {"tables": {"item": TableSection(), "user": TableSection(initial="s3://bucket/rows.npy")}},
    ],
    ids=str,
)
def test_a_store_is_reached_over_the_network_of_the_machine(section: dict[str, Any]) -> None:
    assert not network_namespace.is_wanted(RunConfig(**section), HERE)


def test_it_is_where_a_run_is_that_counts_and_not_where_it_was_made() -> None:
    made_in_a_store = RunConfig(run=RunSection(folder="s3://bucket/runs/a"))
    assert network_namespace.is_wanted(made_in_a_store, HERE)
    assert not network_namespace.is_wanted(RunConfig(), parse_path("s3://bucket/runs/copy"))


@pytest.fixture
def isolated() -> Iterator[ForkServer]:
    with ForkServer(["support.forked"]) as server:
        server.isolate()
        yield server


@needs_namespaces
def test_inside_processes_reach_each_other_and_nobody_outside_does(isolated: ForkServer) -> None:
    with isolated.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert forked.exit_code(isolated, forked.connect, port) == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as outside:
        assert forked.exit_code(isolated, forked.connect, outside.getsockname()[1]) == 1


@needs_namespaces
def test_a_second_time_changes_nothing(isolated: ForkServer) -> None:
    with isolated.listen("127.0.0.1", 0) as listener:
        isolated.isolate()
        assert forked.exit_code(isolated, forked.connect, listener.getsockname()[1]) == 0


@needs_namespaces
def test_inside_one_is_who_one_was(isolated: ForkServer) -> None:
    assert forked.exit_code(isolated, forked.be, os.geteuid(), os.getegid()) == 0


def test_without_one_it_listens_where_everybody_is() -> None:
    with ForkServer([]) as server:
        with server.listen("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), SECONDS).close()
            with pytest.raises(ConfigError, match=r"^cluster.master = \d+: Address already in use"):
                server.listen("127.0.0.1", port)
        assert not server.is_isolated


def test_refused_namespace_leaves_process_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process tries it first, since a namespace cannot be left."""
    before = os.readlink("/proc/self/ns/net")
    monkeypatch.setattr(os, "fork", lambda: 1 << 22)
    monkeypatch.setattr(os, "waitpid", lambda pid, options: (pid, errno.EPERM << 8))
    with pytest.raises(PermissionError):
        network_namespace.enter_network_namespace()
    assert os.readlink("/proc/self/ns/net") == before


@pytest.mark.parametrize(
    ("failure", "is_told"),
    [
        ("trainer 0: OSError: [Errno 101] Network is unreachable", True),
        ("trainer 0: gaierror: [Errno -3] Temporary failure in name resolution", True),
        ("trainer 0: ValueError: shapes differ", False),
    ],
)
def test_code_that_misses_a_network_is_told_the_remedy(failure: str, is_told: bool) -> None:
    assert ('cluster.namespace = "off"' in network_namespace.hint(failure)) == is_told

"""Metrics for Prometheus: what is served, and that the records of a resumed run replace earlier ones."""

import json
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.commands import free_port

from hybrid.config import ClusterSection
from hybrid.errors import ConfigError
from hybrid.loggers.record_file import METRICS_FILE
from workers.launching.launcher import serving_metrics
from workers.run_folder.run_access import RESTARTS_FILE

TRAIN = {
    "kind": "train",
    "step": 10,
    "time": 5.5,
    "loss": 0.5,
    "auc": None,
    "phase_seconds": {"lookup": 0.25},
}
UNKNOWN = {"kind": "unknown", "step": 0, "time": 1.0, 'a"\n.unknown_fraction': 0.125}


def append(path: Path, *records: object, end: str = "\n") -> None:
    with path.open("a") as file:
        file.write("\n".join(map(json.dumps, records)) + end)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def served(tmp_path: Path, port: int) -> Iterator[Path]:
    with serving_metrics(ClusterSection(metrics_port=port), tmp_path):
        yield tmp_path


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as response:
        return str(response.read().decode())


def samples(port: int) -> dict[tuple[str, ...], float]:
    """Return the samples of a run by name and values of labels."""
    families = text_string_to_metric_families(get(port, "/metrics"))
    found = [each for family in families for each in family.samples]
    return {(each.name, *each.labels.values()): each.value for each in found}


def test_the_server_ends_with_a_failed_run(port: int, tmp_path: Path) -> None:
    section = ClusterSection(metrics_port=port)
    with suppress(RuntimeError), serving_metrics(section, tmp_path):
        (thread,) = (each for each in threading.enumerate() if each.name == "prometheus")
        raise RuntimeError
    thread.join(20)
    assert not thread.is_alive()


def test_the_last_record_of_each_kind_is_served(served: Path, port: int) -> None:
    before = samples(port)
    assert before["hybrid_restarts_total",] == 0, "a run without files"
    assert before["process_resident_memory_bytes",] > 1 << 20
    append(served / METRICS_FILE, {**TRAIN, "step": 1}, UNKNOWN, TRAIN)
    append(served / RESTARTS_FILE, {"cause": "killed"}, {"cause": "killed"})
    now = samples(port)
    assert now["hybrid_metric", "train", "step"] == 10
    assert now["hybrid_metric", "train", "loss"] == 0.5
    assert ("hybrid_metric", "train", "auc") not in now
    assert now["hybrid_timestamp_seconds", "train"] == 5.5
    assert now["hybrid_phase_seconds", "lookup"] == 0.25
    assert now["hybrid_unknown_fraction", 'a"\n'] == 0.125
    assert now["hybrid_restarts_total",] == 2
    assert get(port, "/healthz") == "ok\n"


def test_only_complete_lines_are_read(served: Path, port: int) -> None:
    append(served / METRICS_FILE, TRAIN, {**TRAIN, "step": 20}, end="")
    assert samples(port)["hybrid_metric", "train", "step"] == 10
    append(served / METRICS_FILE, end="\n")
    assert samples(port)["hybrid_metric", "train", "step"] == 20


def test_a_resumed_run_has_a_new_file(served: Path, port: int) -> None:
    append(served / METRICS_FILE, TRAIN, {**TRAIN, "kind": "test"})
    assert samples(port)["hybrid_metric", "test", "step"] == 10
    append(served / "rewritten", {**TRAIN, "step": 5})
    (served / "rewritten").replace(served / METRICS_FILE)
    now = samples(port)
    assert now["hybrid_metric", "train", "step"] == 5
    assert ("hybrid_metric", "test", "step") not in now


def test_a_client_that_sends_nothing_delays_others_only(served: Path, port: int) -> None:
    with closing(socket.create_connection(("127.0.0.1", port))):
        assert get(port, "/healthz") == "ok\n"


def test_the_port_is_bound_to_the_host_of_the_master(served: Path, port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=20)


def test_the_port_is_closed_at_the_end(tmp_path: Path, port: int) -> None:
    with serving_metrics(ClusterSection(metrics_port=port), tmp_path):
        pass
    with pytest.raises(urllib.error.URLError):
        get(port, "/healthz")


def test_an_unusable_port_is_refused(served: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    section = ClusterSection(metrics_port=port)
    with pytest.raises(ConfigError, match=rf"^cluster\.metrics_port = {port}: "):
        serving_metrics(section, served)
    for name in [name for name in sys.modules if name.endswith("prometheus_server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"^cluster\.metrics_port: .*hybrid-parallel\[prometheus\]"):
        serving_metrics(section, served)

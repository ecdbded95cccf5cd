"""A web server of ``/metrics``, for Prometheus, and of ``/healthz``. It reads the files of a run folder.

The server runs in the launcher, or in a master that was started by hand. Its thread serves requests one by
one, so a flood of requests cannot exhaust the process. The package prometheus-client must be installed.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, MetricsHandler, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hybrid.loggers.record_file import METRICS_FILE, NO_NUMBERS, Record, parse_records
from hybrid.storage.files import open_reader
from workers.run_folder import run_access
from workers.run_folder.run_access import UNKNOWN_FRACTION

_REQUEST_SECONDS = 2.0
_LOG = logging.getLogger(__name__)


class _RunCollector(Collector):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inode = self._offset = 0
        self._records: dict[str, Record] = {}  # the last record of each kind

    def collect(self) -> Iterator[Metric]:
        self._read()
        records = self._records
        restarts = len(run_access.read_restarts(self._folder))
        yield CounterMetricFamily("hybrid_restarts", "Restarts by hybrid launch.", restarts)
        numbers = {
            (kind, name): value
            for kind, record in records.items()
            for name, value in record.items()
            if name not in (*NO_NUMBERS, "time") and value is not None
        }
        text = "Each number of the last record of metrics.jsonl, by the kind of the record."
        yield _family("metric", text, ["kind", "name"], numbers)
        text = "Unknown values by column of the held-out rows, and by growing table since the last log step."
        fractions = {
            k.removesuffix(UNKNOWN_FRACTION): v for (_, k), v in numbers.items() if UNKNOWN_FRACTION in k
        }
        yield _family("unknown_fraction", text, ["column"], fractions)
        times = {kind: record["time"] for kind, record in records.items() if "time" in record}
        yield _family("timestamp_seconds", "Time of the last record.", ["kind"], times)
        text = "Time by phase between the last two log steps, mean over the trainers."
        yield _family("phase_seconds", text, ["phase"], records.get("train", {}).get("phase_seconds", {}))
        text = "Resident memory of each role that this process has started."
        resident: dict[str, int] = {}
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # the process has ended
                resident[process.name()] = process.memory_info().rss
        yield _family("role_memory_bytes", text, ["role"], resident)

    def _read(self) -> None:
        """Read the new records of metrics.jsonl; all records if a resumed run has replaced the file."""
        with suppress(FileNotFoundError), open_reader(self._folder / METRICS_FILE) as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset, self._records = inode, 0, {}
            file.seek(self._offset)
            lines, newline, _ = file.read().rpartition(b"\n")
            self._offset += len(lines + newline)
            self._records |= {record["kind"]: record for record in parse_records(lines)}


def _family(name: str, text: str, labels: list[str], values: Mapping[Any, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"hybrid_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(key if isinstance(key, tuple) else (key,), value)
    return family


class _Handler(MetricsHandler):
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/healthz":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        self.wfile.write(b"ok\n")

    do_HEAD = do_GET


class _MetricsServer(HTTPServer):
    def handle_error(self, *_: object) -> None:
        _LOG.info("a request for metrics has failed", exc_info=True)

    def serve(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread handles them
        self.serve_forever()


@contextmanager
def serving(listener: socket.socket, folder: Path) -> Iterator[None]:
    """Serve metrics of the run in ``folder`` during the block, and close ``listener`` at its end."""
    registry = CollectorRegistry()
    registry.register(_RunCollector(folder))
    ProcessCollector(registry=registry)
    with _MetricsServer(("", 0), _Handler.factory(registry), bind_and_activate=False) as server:
        server.socket.close()
        server.socket = listener
        threading.Thread(target=server.serve, name="prometheus", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()

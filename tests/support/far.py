"""Prepared data elsewhere: in a store of the tests, or in memory, where what is read can be spoilt."""

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from support.stores import Store

from hybrid.config import RunConfig
from hybrid.data.dataset.remote_dataset import StoreFolder
from hybrid.data.prepare.dataset_location import ensure_prepared
from hybrid.errors import HybridError
from hybrid.storage.remote_path import RemotePath, parse_path

_BUCKET = "open"


def in_store(config: RunConfig, store: Store, folder: Path, address: str = "") -> RunConfig:
    """``config`` with its data in a store, where those without credentials can read them, by their URL.

    A cluster that is older than the store has none.

    Args:
        folder: for what its roles keep here.
        address: of the store, if not its own.
    """
    everything = f"arn:aws:s3:::{_BUCKET}/*"
    statement = {"Effect": "Allow", "Principal": "*", "Action": "s3:*", "Resource": everything}
    store.request("PUT", f"/{_BUCKET}")
    store.request("PUT", f"/{_BUCKET}?policy", json.dumps({"Statement": [statement]}).encode())
    query = f"endpoint_override={address or store.address}&scheme=http&region=us-east-1&anonymous=true"
    url = f"s3://{_BUCKET}/prepared"
    data = dataclasses.replace(
        config.data, cache_folder=f"{url}?{query}", local_cache_folder=str(folder / "local")
    )
    config = config.replace(data=data)
    ensure_prepared(config, parse_path(url))
    return config


class FakeFolder(StoreFolder):
    """A folder of a store in memory.

    Attributes:
        files: by name.
        ranges: of each range, its name, start and stop.
        spoil: what becomes of each range that is read.
    """

    def __init__(self) -> None:
        super().__init__(RemotePath("s3://unused", ""))
        self.files: dict[str, bytes] = {}
        self.ranges: list[tuple[str, int, int]] = []
        self.spoil: Callable[[str, bytes], bytes] = lambda name, data: data
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return "fake://data"

    def url(self, name: str) -> str:
        return f"{self}/{name}"

    def read(self, name: str) -> bytes:
        if name not in self.files:
            raise HybridError(f"{self}/{name}: is not there")
        return self.files[name]

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        with self._lock:
            self.ranges.append((name, start, stop))
            return self.spoil(name, self.read(name)[start:stop])

    def write(self, name: str, blocks: Iterator[bytes]) -> None:
        self.files[name] = b"".join(blocks)

"""What a checkpoint holds, as the file that is written into it last says. Free of torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hybrid.checkpoint.files import MANIFEST_FILE, Files, damaged, shard_file, write_text, writing
from hybrid.checkpoint.manifest_rules import check_fields
from hybrid.errors import CheckpointError
from hybrid.private_files import sync

FORMAT = 2
PARTIAL = ".partial"  # ends the name of what is being written
_VERIFYING_THREADS = 4

# Of the values in a manifest's progress.
BEST = "best"
# One of a thousand tables on a hundred workers has 20 MB.
_MOST_BYTES = 32 << 20


class Best(NamedTuple):
    """The best checkpoint of a run: its step, and its value of a metric."""

    metric: str
    value: float
    step: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps taken.
        epoch: epochs finished.
        tables: table name to [number of rows, dim, number of shards].
        files: every other file of the folder.
        metrics: the last evaluation's; empty where there was none.
        progress: what the run has counted so far; empty outside a run.
    """

    step: int
    epoch: int
    tables: dict[str, tuple[int, int, int]]
    files: Files = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read the manifest of a checkpoint; CheckpointError where it is none, or altered."""
        try:
            document = json.loads(_read_text(path))
            if not isinstance(document, dict):
                raise ValueError("it is no object")
            if (version := document.get("format")) != FORMAT:
                raise CheckpointError(f"{path}: written by another version (format {version!r:.80})")
            if not document.keys() >= {"manifest", "sha256"}:
                raise ValueError("it has no fields, or no checksum of them")
            fields = document["manifest"]
            if document["sha256"] != _text_checksum(json.dumps(fields)):
                raise CheckpointError(f"{path}: altered since the checkpoint was written")
            check_fields(fields, {each.name for each in dataclasses.fields(cls)})
        except RecursionError as error:
            raise CheckpointError(f"{path}: is not a manifest: nested too deeply") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: is not a manifest: {error}") from error
        fields["files"] = {name: (size, sha256) for name, (size, sha256) in fields["files"].items()}
        fields["tables"] = {name: tuple(shape) for name, shape in fields["tables"].items()}
        read = cls(**fields)
        read._check_shards(path)
        return read

    @property
    def best(self) -> Best | None:
        """The best checkpoint of the run so far, where it keeps one."""
        values = self.progress.get(BEST)
        return None if values is None else Best(*values)

    def _check_shards(self, path: Path) -> None:
        for table, (_, _, count) in self.tables.items():
            # The files are fewer than any number that somebody may have written there.
            for index in range(min(count, len(self.files) + 1)):
                if (name := shard_file(table, index, count)) not in self.files:
                    raise CheckpointError(f"{path}: lists no {name}, which table {table!r} is said to have")

    def write(self, folder: Path) -> None:
        """Write it into ``folder``, with a checksum of its own; at once, if another is there."""
        fields = dataclasses.asdict(self)
        document = {"format": FORMAT, "manifest": fields, "sha256": _text_checksum(json.dumps(fields))}
        partial = MANIFEST_FILE + PARTIAL
        write_text(folder, partial, json.dumps(document, indent=1))
        with writing(folder / MANIFEST_FILE):
            os.replace(folder / partial, folder / MANIFEST_FILE)
            sync(folder)

    def verify(self, folder: Path) -> None:
        """Compare every file of ``folder`` with its checksum.

        Raises:
            CheckpointError: one is missing or altered; names it.
        """
        with ThreadPoolExecutor(_VERIFYING_THREADS, "verify") as threads:
            found = threads.map(lambda name: _checksum(folder / name), self.files)
            for (name, (_, sha256)), checksum in zip(self.files.items(), found, strict=True):
                if checksum != sha256:
                    raise damaged(folder / name)


def _read_text(path: Path) -> str:
    """The text of a manifest; ValueError where it is larger than one can be."""
    if not path.is_file():
        raise ValueError("it is no file")
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
    return content.decode()


def _checksum(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _text_checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

"""Checksums of files: of samples of them, which cost next to nothing, or of the whole."""

import hashlib
import io
from pathlib import Path

from hybrid.storage import files
from hybrid.storage.remote_path import StoragePath

NUM_BLOCKS = 32
BLOCK_BYTES = 32 << 10


def sampled(path: StoragePath) -> str:
    """A checksum of the size and of 32 blocks of 32 KiB, evenly spread, the first and the last included.

    A file of no more than 1 MiB is read whole. What is altered elsewhere in a larger one goes unseen.
    """
    digest = hashlib.sha256()
    with files.open_reader(path, ahead=0) as file:
        size = file.seek(0, io.SEEK_END)
        digest.update(size.to_bytes(8, "little"))
        last = max(0, size - BLOCK_BYTES)
        for i in range(NUM_BLOCKS):
            file.seek(last * i // (NUM_BLOCKS - 1) if size > NUM_BLOCKS * BLOCK_BYTES else BLOCK_BYTES * i)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def whole(path: Path) -> str:
    """A checksum of all of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

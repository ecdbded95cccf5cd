"""Stores that are not S3's, each a program on loopback with one container, ``bucket``."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyarrow import fs
from support import gcs_server
from support.stores import BUCKET, named_by_environment

from hybrid.storage.remote_path import RemotePath

AZURITE = shutil.which("azurite-blob")
# What every Azurite has, and anybody may know.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextmanager
def google() -> Iterator[RemotePath]:
    """A bucket of Google's; nobody needs credentials for it."""
    with _serving([sys.executable, gcs_server.__file__]) as address:
        yield RemotePath(f"gs://{BUCKET}", "", f"anonymous=true&scheme=http&endpoint_override={address}")


@contextmanager
def azure(folder: Path) -> Iterator[RemotePath]:
    """A container of Azure's, whose key the environment has; ``folder`` is for what its server leaves."""
    assert AZURITE is not None
    # It does not know the newest version of what it speaks, which pyarrow asks for.
    flags = [
        "--blobPort",
        "0",
        "--inMemoryPersistence",
        "--skipApiVersionCheck",
        "--disableTelemetry",
        "--silent",
    ]
    with _serving([AZURITE, "--blobHost", "127.0.0.1", *flags], folder) as address:
        made = {"blob_storage_authority": address, "blob_storage_scheme": "http"}
        made |= {"dfs_storage_authority": address, "dfs_storage_scheme": "http"}
        fs.AzureFileSystem(_ACCOUNT, account_key=_KEY, **made).create_dir(BUCKET)
        with named_by_environment({"AZURE_STORAGE_KEY": _KEY}):
            yield RemotePath(f"abfs://{_ACCOUNT}@{address}", BUCKET, "enable_tls=false")


@contextmanager
def _serving(command: list[str], folder: Path | None = None) -> Iterator[str]:
    """The address at which a program listens, which says so in a line."""
    command = ["setpriv", "--pdeathsig", "KILL", *command]
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            lines = iter(server.stdout.readline, "")
            yield next(found[1] for line in lines if (found := re.search(r"listens on http://(\S+)", line)))
        finally:
            server.kill()

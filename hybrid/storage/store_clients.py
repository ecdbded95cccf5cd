"""Clients of object stores, which are pyarrow's: their addresses, credentials and timeouts."""

from __future__ import annotations

import base64
import os
import re
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from hybrid.storage.remote_path import parse_options

if TYPE_CHECKING:
    from pyarrow import fs

# The client repeats requests itself, since it knows which of them it may. Its pauses double, up to 20 s.
ATTEMPTS = 7
RETRY_SECONDS = 60.0  # for Google's client, which takes no number of attempts; about as long
_CONNECT_SECONDS = 5.0
_SILENT_SECONDS = 10.0  # a connection without traffic for this long is closed
# The certificates of Debian, Red Hat, SUSE and Alpine. The client in pyarrow's wheel looks where the machine
# had them on which it was built.
_CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
UNTRUSTED = r"curlCode: (60|77)|CURL error \[(60|77)\]|certificate"  # in messages of clients


def get_client(root: str, query: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a store, and the prefix of its paths.

    Raises:
        ValueError: the URL is not valid for this kind of store.
    """
    # The address of an S3 store that is not Amazon's, from the variables that Amazon's programs read.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    return _client(root, query, endpoint, os.getpid())


@lru_cache
def _client(root: str, query: str, endpoint: str | None, process: int) -> tuple[fs.FileSystem, str]:
    """Make a client; each process needs its own, since a client has threads."""
    from pyarrow import fs

    scheme, _, authority = root.partition("://")
    options = parse_options(query)
    if scheme == "s3":
        return _s3_client(authority, options, endpoint), f"{authority}/"
    if scheme == "gs":
        gcs = fs.GcsFileSystem(
            anonymous=options.get("anonymous") == "true",
            scheme=options.get("scheme"),
            endpoint_override=options.get("endpoint_override"),
            retry_time_limit=timedelta(seconds=RETRY_SECONDS),
        )
        return gcs, f"{authority}/"
    if scheme in ("abfs", "abfss"):
        return _azure_client(authority, options)
    filesystem, path = fs.FileSystem.from_uri(f"{root}/x" + (f"?{query}" if query else ""))
    return filesystem, path.removesuffix("x")


def _s3_client(bucket: str, options: dict[str, str], endpoint: str | None) -> fs.FileSystem:
    from pyarrow import fs

    address = options.get("endpoint_override") or endpoint
    make = partial(
        fs.S3FileSystem,
        anonymous=options.get("anonymous") == "true",
        region=options.get("region"),
        scheme=options.get("scheme"),
        endpoint_override=address,
        force_virtual_addressing=options.get("force_virtual_addressing") == "true",
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_SILENT_SECONDS,
        background_writes=False,  # a background writer would buffer without a limit
        allow_delayed_open=True,  # a small file is written in one request, when it is closed
        tls_ca_file_path=os.environ.get("AWS_CA_BUNDLE") or next(filter(os.path.isfile, _CERTIFICATES), None),
    )
    if address is not None and not address.startswith("http://") and options.get("scheme") != "http":
        # With retries, the client would repeat a request to an untrusted store for a minute.
        once = make(retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1))
        try:
            once.get_file_info(bucket)
        except OSError as error:
            if re.search(UNTRUSTED, str(error)):
                raise
    return make(retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS))


def _azure_client(authority: str, options: dict[str, str]) -> tuple[fs.FileSystem, str]:
    """Make a client with the key or token of the environment, or with other credentials that it finds."""
    from pyarrow import fs

    account, prefix, authorities = _split_azure_authority(authority)
    scheme = "http" if options.get("enable_tls") == "false" else "https"
    key = os.environ.get("AZURE_STORAGE_KEY") or None
    token = None if key else os.environ.get("AZURE_STORAGE_SAS_TOKEN") or None
    if key is not None:
        try:
            base64.b64decode(key, validate=True)
        except ValueError as error:  # Azure's client would end the process
            raise ValueError("AZURE_STORAGE_KEY is no valid base64") from error
    filesystem = fs.AzureFileSystem(
        account,
        account_key=key,
        sas_token=token,
        blob_storage_scheme=scheme,
        dfs_storage_scheme=scheme,
        **authorities,
    )
    if key is None and token is None:
        # Without credentials this fails; if its first request is a read, the client ends the process instead.
        with suppress(OSError):
            filesystem.get_file_info(f"{prefix or 'any/'}any")
    return filesystem, prefix


def _split_azure_authority(authority: str) -> tuple[str, str, dict[str, str]]:
    """Return the account of an authority, the prefix of paths, and the hosts of the services."""
    user, _, host = authority.rpartition("@")
    name, _, domain = host.partition(".")
    service, _, rest = domain.partition(".")
    if service in ("blob", "dfs"):  # CONTAINER@ACCOUNT.dfs.core.windows.net, or without a container
        hosts = {"blob_storage_authority": f".blob.{rest}", "dfs_storage_authority": f".dfs.{rest}"}
        return name, f"{user}/" if user else "", hosts
    if not user:
        raise ValueError("names no account; write abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER")
    if domain or ":" in host:  # ACCOUNT@HOST:PORT/CONTAINER
        return user, "", {"blob_storage_authority": host, "dfs_storage_authority": host}
    return user, f"{host}/", {}  # ACCOUNT@CONTAINER

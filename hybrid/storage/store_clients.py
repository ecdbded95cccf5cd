"""The clients of stores, which are pyarrow's: their addresses, their credentials, and how long they ask."""

from __future__ import annotations

import base64
import os
import re
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

from hybrid.storage.remote_path import parse_options

# The client's own: it knows which of its requests may be made again. Its pauses double, to 20 s at most.
ATTEMPTS = 7
RETRY_SECONDS = 60.0  # of Google's client, which has no number of attempts; about as long
_CONNECT_SECONDS = 5.0
_SILENT_SECONDS = 10.0  # a connection on which nothing moves for so long is given up
# Where systems keep the certificates that TLS asks for: Debian's, Red Hat's, SUSE's, Alpine's. The client in
# pyarrow's wheel looks where the machine had them on which it was built.
_CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
UNTRUSTED = r"curlCode: (60|77)|CURL error \[(60|77)\]|certificate"  # of a certificate, in what clients say
_AZURE_URL = "write abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER"


def client(root: str, query: str) -> tuple[Any, str]:
    """The file system of a store, and what its paths begin with.

    Raises:
        ValueError: the URL is none of such a store; says what is.
    """
    return _client(root, query, _endpoint(), os.getpid())


@lru_cache
def _client(root: str, query: str, endpoint: str | None, process: int) -> tuple[Any, str]:
    """One a process, since it has threads."""
    from pyarrow import fs

    scheme, _, authority = root.partition("://")
    given = parse_options(query)
    if scheme == "s3":
        return _s3(authority, given, endpoint), f"{authority}/"
    if scheme == "gs":
        return _gcs(given), f"{authority}/"
    if scheme in ("abfs", "abfss"):
        return _azure(authority, given)
    filesystem, path = fs.FileSystem.from_uri(f"{root}/x" + (f"?{query}" if query else ""))
    return filesystem, path.removesuffix("x")


def _s3(bucket: str, given: dict[str, str], endpoint: str | None) -> Any:
    from pyarrow import fs

    address = given.get("endpoint_override") or endpoint
    bundle = os.environ.get("AWS_CA_BUNDLE") or next(filter(os.path.isfile, _CERTIFICATES), None)
    trying = partial(
        fs.S3FileSystem,
        anonymous=given.get("anonymous") == "true",
        region=given.get("region"),
        scheme=given.get("scheme"),
        endpoint_override=address,
        force_virtual_addressing=given.get("force_virtual_addressing") == "true",
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_SILENT_SECONDS,
        # In the background it would keep all in memory that the network has not taken yet.
        background_writes=False,
        # What is small goes in one request, when it is closed.
        allow_delayed_open=True,
        tls_ca_file_path=bundle,
    )
    if address is not None and not address.startswith("http://") and given.get("scheme") != "http":
        _refuse_certificate(trying(retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1)), bucket)
    return trying(retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS))


def _refuse_certificate(once: Any, bucket: str) -> None:
    """A client that tries again does so for a minute where it does not trust a store."""
    try:
        once.get_file_info(bucket)
    except OSError as error:
        if re.search(UNTRUSTED, str(error)):
            raise


def _endpoint() -> str | None:
    """The address of a store that is not Amazon's, from the environment, as its own programs read it."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def _gcs(given: dict[str, str]) -> Any:
    from pyarrow import fs

    return fs.GcsFileSystem(
        anonymous=given.get("anonymous") == "true",
        scheme=given.get("scheme"),
        endpoint_override=given.get("endpoint_override"),
        retry_time_limit=timedelta(seconds=RETRY_SECONDS),
    )


def _azure(authority: str, given: dict[str, str]) -> tuple[Any, str]:
    """By the key or token in the environment, or what else its client finds; and what paths begin with."""
    from pyarrow import fs

    account, prefix, authorities = _azure_names(authority)
    scheme = "http" if given.get("enable_tls") == "false" else "https"
    key = os.environ.get("AZURE_STORAGE_KEY") or None
    token = None if key else os.environ.get("AZURE_STORAGE_SAS_TOKEN") or None
    if key is not None:
        _refuse_key(key)
    filesystem = fs.AzureFileSystem(
        account,
        account_key=key,
        sas_token=token,
        blob_storage_scheme=scheme,
        dfs_storage_scheme=scheme,
        **authorities,
    )
    if key is None and token is None:
        # Without credentials this is an error; the client ends a process whose first request is to read.
        with suppress(OSError):
            filesystem.get_file_info(f"{prefix or 'any/'}any")
    return filesystem, prefix


def _refuse_key(key: str) -> None:
    """Azure's client ends the process of who gives it another than base64."""
    try:
        base64.b64decode(key, validate=True)
    except ValueError as error:
        raise ValueError("AZURE_STORAGE_KEY is no valid base64") from error


def _azure_names(authority: str) -> tuple[str, str, dict[str, str]]:
    """The account of an authority, what paths begin with, and which hosts answer."""
    user, _, host = authority.rpartition("@")
    name, _, domain = host.partition(".")
    service, _, rest = domain.partition(".")
    if service in ("blob", "dfs"):  # CONTAINER@ACCOUNT.dfs.core.windows.net, with it or without
        hosts = {"blob_storage_authority": f".blob.{rest}", "dfs_storage_authority": f".dfs.{rest}"}
        return name, f"{user}/" if user else "", hosts
    if not user:
        raise ValueError(f"names no account; {_AZURE_URL}")
    if domain or ":" in host:  # ACCOUNT@HOST:PORT/CONTAINER
        return user, "", {"blob_storage_authority": host, "dfs_storage_authority": host}
    return user, f"{host}/", {}  # ACCOUNT@CONTAINER

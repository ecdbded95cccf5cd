"""How a store is reached through ``pyarrow.fs``, how long it is asked, and what its errors mean."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from hybrid.errors import OutageError, StorageError, first_line
from hybrid.storage.places import RemotePath, options

# The client's own: it knows which of its requests may be made again. Its pauses double, to 20 s at most.
ATTEMPTS = 7
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
_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to credentials that may do this"
)
_AGAIN = "the store does not keep up, or is down; try again later"
_ENDPOINT = "see that AWS_ENDPOINT_URL, or the host in the URL, is right and can be reached from here"
_PASSING = (_AGAIN, _ENDPOINT)  # a name that nobody knows may be one that its server does not tell now
# What the texts of errors hold, and what helps; the first that fits counts.
_REMEDIES = (
    (r"NO_SUCH_BUCKET|BucketNotFound|NoSuchBucket", "there is no such bucket; make it, or correct the URL"),
    (r"NO_SUCH_UPLOAD|NoSuchUpload", "what was written of it is gone from the store; write it again"),
    (r"INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|ExpiredToken|InvalidToken", _CREDENTIALS),
    (r"ACCESS_DENIED|status 40[13]|permission|PermissionDenied|Unauthenticated", _CREDENTIALS),
    (r"SLOW_DOWN|HTTP status 5\d\d|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|REQUEST_TIMEOUT", _AGAIN),
    (
        r"curlCode: 60|curlCode: 77|certificate",
        "its TLS certificate is not trusted; set AWS_CA_BUNDLE to a file that has it",
    ),
    (r"NETWORK_CONNECTION|curlCode|Couldn't resolve|onnect", _ENDPOINT),
    (
        r"libjvm|libhdfs|JAVA_HOME",
        "HDFS needs Java and Hadoop's libhdfs; set JAVA_HOME, HADOOP_HOME and CLASSPATH",
    ),
)
_REQUEST_ID = re.compile(r"\s*\(Request ID: [^)]*\)")


@contextmanager
def asking(place: RemotePath, what: str) -> Iterator[tuple[Any, str]]:
    """The file system of a place, and its path there, to do something with.

    Args:
        what: is done, such as "read".

    Raises:
        FileNotFoundError: it is not there.
        StorageError: the store does not do it; says why, and what to do.
        OutageError: the same, since it was down all the while.
    """
    try:
        filesystem, prefix = _filesystem(place.root, place.query, _endpoint(), os.getpid())
        yield filesystem, prefix + place.key
    except StorageError:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place)) from error
    except (OSError, ValueError, NotImplementedError) as error:  # Arrow's own errors are among them
        raise _error(place, what, error) from error


def _error(place: RemotePath, what: str, error: BaseException) -> StorageError:
    text = _REQUEST_ID.sub("", first_line(error))
    remedy = next((r for sign, r in _REMEDIES if re.search(sign, text)), "docs/storage.md says what it needs")
    why, kind = f"{text}; {remedy}", OutageError if remedy in _PASSING else StorageError
    return kind(f"{place}: cannot be {what}: {why}", why)


@lru_cache
def _filesystem(root: str, query: str, endpoint: str | None, process: int) -> tuple[Any, str]:
    """The file system of a store, and what its paths begin with; one a process, since it has threads."""
    from pyarrow import fs

    scheme, _, authority = root.partition("://")
    if scheme == "s3":
        return _s3(options(query), endpoint), f"{authority}/"
    filesystem, path = fs.FileSystem.from_uri(f"{root}/x" + (f"?{query}" if query else ""))
    return filesystem, path.removesuffix("x")


def _s3(given: dict[str, str], endpoint: str | None) -> Any:
    from pyarrow import fs

    bundle = os.environ.get("AWS_CA_BUNDLE") or next(filter(os.path.isfile, _CERTIFICATES), None)
    return fs.S3FileSystem(
        anonymous=given.get("anonymous") == "true",
        region=given.get("region"),
        scheme=given.get("scheme"),
        endpoint_override=given.get("endpoint_override") or endpoint,
        force_virtual_addressing=given.get("force_virtual_addressing") == "true",
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_SILENT_SECONDS,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        # In the background it would keep all in memory that the network has not taken yet.
        background_writes=False,
        # What is small goes in one request, when it is closed.
        allow_delayed_open=True,
        tls_ca_file_path=bundle,
    )


def _endpoint() -> str | None:
    """The address of a store that is not Amazon's, from the environment, as its own programs read it."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None

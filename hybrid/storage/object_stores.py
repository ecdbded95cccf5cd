"""How a store is asked through ``pyarrow.fs``, and what its errors mean."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from hybrid.errors import OutageError, StorageError, first_line
from hybrid.storage.remote_path import RemotePath
from hybrid.storage.store_clients import UNTRUSTED, client


class _Words(NamedTuple):
    """What helps, of one kind of store: with its credentials, its address, its certificate."""

    credentials: str
    endpoint: str
    certificate: str


_WORDS = {
    "s3": _Words(
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to credentials that may do this",
        "see that AWS_ENDPOINT_URL, or the host in the URL, is right and can be reached from here",
        "set AWS_CA_BUNDLE to a file that has it",
    ),
    "gs": _Words(
        "set GOOGLE_APPLICATION_CREDENTIALS to a file of credentials that may do this",
        "see that the store, or endpoint_override in the URL, is right and can be reached from here",
        "set SSL_CERT_FILE to a file that has it",
    ),
    "abfs": _Words(
        "set AZURE_STORAGE_KEY, or what else docs/storage.md names, to credentials that may do this",
        "see that the account in the URL is right and can be reached from here",
        "set SSL_CERT_FILE to a file that has it",
    ),
    "hdfs": _Words(
        "have an account that may do this",
        "see that the host in the URL is right and can be reached from here",
        "have one that is",
    ),
}
_KINDS = {"abfss": "abfs", "viewfs": "hdfs"}
_NO_BUCKET = "there is no such bucket; make it, or correct the URL"
_AGAIN = "the store does not keep up, or is down; try again later"
_HDFS = "HDFS needs Java and Hadoop's libhdfs; set JAVA_HOME, HADOOP_HOME and CLASSPATH"
# What the texts of errors hold, and what helps, or which of a store's words; the first that fits counts.
_REMEDIES = (
    (r"NO_SUCH_BUCKET|BucketNotFound|NoSuchBucket|ContainerNotFound", _NO_BUCKET),
    (r"NO_SUCH_UPLOAD|NoSuchUpload", "what was written of it is gone from the store; write it again"),
    (r"INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|ExpiredToken|InvalidToken", "credentials"),
    (r"ACCESS_DENIED|status (code: )?40[13]|\] 40[13] |permission|PermissionDenied", "credentials"),
    (r"Unauthenticated|AuthenticationException|OAuth2 access token|valid base64", "credentials"),
    (r"SLOW_DOWN|HTTP status (code: )?(5\d\d|429)|\] (5\d\d|429) ", _AGAIN),
    (r"INTERNAL_FAILURE|SERVICE_UNAVAILABLE|REQUEST_TIMEOUT", _AGAIN),
    (UNTRUSTED, "certificate"),
    (r"NETWORK_CONNECTION|curlCode|CURL error|[Cc]ould(n't| not) resolve|onnect|Timeout", "endpoint"),
    (r"libjvm|libhdfs|JAVA_HOME", _HDFS),
)
_REQUEST_ID = re.compile(r"\s*\(Request ID: [^)]*\)")
# What Google's client says of its own doing.
_CLIENTS_OWN = re.compile(r" error_info=\{.*|google::cloud::Status\(|\w+ error, with a last message of ")


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
        filesystem, prefix = client(place.root, place.query)
        yield filesystem, prefix + place.key
    except StorageError:
        raise
    except FileNotFoundError as error:
        if what == "written":  # which asks for nothing but a bucket
            raise _error(place, what, f"NoSuchBucket: {place.root}") from error
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place)) from error
    except Exception as error:
        from pyarrow import ArrowException

        if not isinstance(error, OSError | ValueError | NotImplementedError | ArrowException):
            raise
        raise _error(place, what, first_line(error)) from error


def _error(place: RemotePath, what: str, said: str) -> StorageError:
    scheme = place.root.partition("://")[0]
    words = _WORDS[_KINDS.get(scheme, scheme)]
    remedy = next((r for sign, r in _REMEDIES if re.search(sign, said)), "docs/storage.md says what it needs")
    # A name that nobody knows may be one that its server does not tell now.
    kind = OutageError if remedy in (_AGAIN, "endpoint") else StorageError
    if remedy == "certificate":
        remedy = f"its TLS certificate is not trusted; {words.certificate}"
    text = _CLIENTS_OWN.sub("", _REQUEST_ID.sub("", said))
    why = f"{text}; {getattr(words, remedy, remedy)}"
    return kind(f"{place}: cannot be {what}: {why}", why)


def listed(filesystem: Any, path: str, is_deep: bool) -> list[Any]:
    """What there is in a folder, as pyarrow tells it; of Google all that is below it, and no folders.

    Raises:
        OSError: its bucket is not there, or the store does not answer.
    """
    from pyarrow import fs

    kind = filesystem.type_name
    try:
        found: list[Any] = filesystem.get_file_info(
            fs.FileSelector(path, recursive=is_deep or kind == "gcs")  # whose folders are not listed
        )
        return found
    except FileNotFoundError as error:
        is_bucket_gone = kind == "gcs" or (kind == "abfs" and _is_container_gone(filesystem, path))
        if is_bucket_gone:
            raise OSError(f"NoSuchBucket: {path.partition('/')[0]}") from error
    except OSError as error:
        if kind != "gcs" or not str(error).startswith("No such file or directory"):
            raise
    return []


def _is_container_gone(filesystem: Any, path: str) -> bool:
    found: str = filesystem.get_file_info(path.partition("/")[0]).type.name
    return found == "NotFound"


def content_of(metadata: dict[bytes | str, bytes], kind: str) -> str:
    """What a store calls the content of a file; empty where it calls it nothing, or anew each time."""
    named = {"s3": ("ETag",), "gcs": ("md5Hash", "crc32c"), "abfs": ("Content-Hash",)}.get(kind, ())
    return next((metadata[name].decode() for name in named if metadata.get(name)), "")

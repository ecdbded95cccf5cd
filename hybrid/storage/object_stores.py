"""Requests to object stores through ``pyarrow.fs``, and what the errors of stores mean."""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NamedTuple

from hybrid.errors import OutageError, StorageError, first_line
from hybrid.storage.remote_path import RemotePath
from hybrid.storage.store_clients import UNTRUSTED, get_client

if TYPE_CHECKING:
    from pyarrow import fs


class _Remedies(NamedTuple):
    """What helps with the credentials, the address and the certificate of one kind of store."""

    credentials: str
    endpoint: str
    certificate: str


_STORE_REMEDIES = {
    "s3": _Remedies(
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to credentials that may do this",
        "check that AWS_ENDPOINT_URL, or the host in the URL, is right and can be reached from here",
        "set AWS_CA_BUNDLE to a file that contains it",
    ),
    "gs": _Remedies(
        "set GOOGLE_APPLICATION_CREDENTIALS to a file of credentials that may do this",
        "check that the store, or endpoint_override in the URL, is right and can be reached from here",
        "set SSL_CERT_FILE to a file that contains it",
    ),
    "abfs": _Remedies(
        "set AZURE_STORAGE_KEY, or another variable of docs/storage.md, to credentials that may do this",
        "check that the account in the URL is right and can be reached from here",
        "set SSL_CERT_FILE to a file that contains it",
    ),
    "hdfs": _Remedies(
        "use an account that may do this",
        "check that the host in the URL is right and can be reached from here",
        "use one that is",
    ),
}
_SAME_STORE = {"abfss": "abfs", "viewfs": "hdfs"}
_OVERLOADED = "the store is overloaded or down; try again later"
# Patterns in the texts of errors, each with a remedy or the name of a store's remedy; the first match counts.
_REMEDIES = (
    (
        r"NO_SUCH_BUCKET|BucketNotFound|NoSuchBucket|ContainerNotFound",
        "there is no such bucket; make it, or correct the URL",
    ),
    (r"NO_SUCH_UPLOAD|NoSuchUpload", "the store has dropped the unfinished upload; write it again"),
    (r"INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|ExpiredToken|InvalidToken", "credentials"),
    (r"ACCESS_DENIED|status (code: )?40[13]|\] 40[13] |permission|PermissionDenied", "credentials"),
    (r"Unauthenticated|AuthenticationException|OAuth2 access token|valid base64", "credentials"),
    (r"SLOW_DOWN|HTTP status (code: )?(5\d\d|429)|\] (5\d\d|429) ", _OVERLOADED),
    (r"INTERNAL_FAILURE|SERVICE_UNAVAILABLE|REQUEST_TIMEOUT", _OVERLOADED),
    (UNTRUSTED, "certificate"),
    (r"NETWORK_CONNECTION|curlCode|CURL error|[Cc]ould(n't| not) resolve|onnect|Timeout", "endpoint"),
    (
        r"libjvm|libhdfs|JAVA_HOME",
        "HDFS needs Java and Hadoop's libhdfs; set JAVA_HOME, HADOOP_HOME and CLASSPATH",
    ),
)
# Parts of messages that help nobody: request ids, and what Google's client reports about itself.
_NOISE = re.compile(
    r"\s*\(Request ID: [^)]*\)| error_info=\{.*|google::cloud::Status\(|\w+ error, with a last message of "
)
_MAX_BUFFERED_BYTES = 64 << 20


@contextmanager
def store_request(path: RemotePath, action: str) -> Iterator[tuple[fs.FileSystem, str]]:
    """Yield the file system of a store, and the name of a path in it, for one request.

    Args:
        action: a participle for error messages, such as "read".

    Raises:
        FileNotFoundError: there is no such file.
        StorageError: the store refuses; the text says why, and what to do.
        OutageError: the same, since the store was down during all attempts.
    """
    try:
        filesystem, prefix = get_client(path.root, path.query)
        yield filesystem, prefix + path.key
    except StorageError:
        raise
    except FileNotFoundError as error:
        if action == "written":  # a write requires only the bucket
            raise _store_error(path, action, f"NoSuchBucket: {path.root}") from error
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    except Exception as error:
        from pyarrow import ArrowException

        if not isinstance(error, OSError | ValueError | NotImplementedError | ArrowException):
            raise
        raise _store_error(path, action, first_line(error)) from error


def _store_error(path: RemotePath, action: str, text: str) -> StorageError:
    scheme = path.root.partition("://")[0]
    store_remedies = _STORE_REMEDIES[_SAME_STORE.get(scheme, scheme)]
    matches = (remedy for pattern, remedy in _REMEDIES if re.search(pattern, text))
    remedy = next(matches, "docs/storage.md lists what a store needs")
    # An unknown host may be one whose name server is down.
    kind = OutageError if remedy in (_OVERLOADED, "endpoint") else StorageError
    remedy_text = getattr(store_remedies, remedy, remedy)
    if remedy == "certificate":
        remedy_text = f"its TLS certificate is not trusted; {remedy_text}"
    reason = f"{_NOISE.sub('', text)}; {remedy_text}"
    return kind(f"{path}: cannot be {action}: {reason}", reason)


def list_store(filesystem: fs.FileSystem, key: str, is_deep: bool) -> list[fs.FileInfo]:
    """List a folder; Google's store lists all files below it, and no folders.

    Raises:
        OSError: the bucket does not exist, or the store does not answer.
    """
    from pyarrow import fs

    kind = filesystem.type_name
    try:
        return list(filesystem.get_file_info(fs.FileSelector(key, recursive=is_deep or kind == "gcs")))
    except FileNotFoundError as error:
        bucket = key.partition("/")[0]
        if kind == "gcs" or (kind == "abfs" and filesystem.get_file_info(bucket).type.name == "NotFound"):
            raise OSError(f"NoSuchBucket: {bucket}") from error
    except OSError as error:
        if kind != "gcs" or not str(error).startswith("No such file or directory"):
            raise
    return []


class RemoteReader(io.RawIOBase):
    """A file of a store, read as Python's files are; methods raise the errors of :func:`store_request`."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        with store_request(path, "read") as (filesystem, key):
            self._file = filesystem.open_input_file(key)
            self._size = self._file.size()
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        content = self._read(len(view))
        view[: len(content)] = content
        return len(content)

    def readall(self) -> bytes:
        return self._read(self._size)

    def _read(self, num_bytes: int) -> bytes:
        with store_request(self._path, "read"):
            content = self._file.read_at(min(num_bytes, self._size - self._position), self._position)
        self._position += len(content)
        return bytes(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = min(max(start + offset, 0), self._size)
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class _RemoteWriter:
    """A file of a store that is being written; it exists once it is closed."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._buffered_bytes = 0
        with store_request(path, "written") as (filesystem, key):
            # Azure shows a file from its first byte on: it is written to a folder of its own, and copied.
            folder, _, name = key.rpartition("/")
            self._temporary = f"{folder}/.{name}.{token_hex(4)}" if filesystem.type_name == "abfs" else None
            target = key if self._temporary is None else f"{self._temporary}/part"
            # None: pyarrow would compress by the suffix of the name.
            self._stream = filesystem.open_output_stream(target, compression=None)

    @property
    def closed(self) -> bool:
        return bool(self._stream.closed)

    def write(self, content: bytes | memoryview, /) -> int:
        """See :class:`hybrid.storage.files.Writer`."""
        num_bytes = memoryview(content).nbytes
        with store_request(self._path, "written"):
            self._stream.write(content)
            self._buffered_bytes += num_bytes
            if self._temporary is not None and self._buffered_bytes >= _MAX_BUFFERED_BYTES:
                self._stream.flush()  # Azure's client buffers without a limit
                self._buffered_bytes = 0
        return num_bytes

    def close(self) -> None:
        with store_request(self._path, "written") as (filesystem, key):
            self._stream.close()
            if self._temporary is not None:
                filesystem.copy_file(f"{self._temporary}/part", key)
                filesystem.delete_dir(self._temporary)

    def abandon(self) -> None:
        """Remove what was written. A stream can only be closed, which makes a file of it."""
        with suppress(OSError), store_request(self._path, "removed") as (filesystem, key):
            self._stream.close()
            if self._temporary is not None:
                filesystem.delete_dir(self._temporary)
            else:
                filesystem.delete_file(key)


@contextmanager
def open_remote_writer(path: RemotePath) -> Iterator[_RemoteWriter]:
    """Open a file of a store for writing; it exists at the end, and a failure leaves no file."""
    writer = _RemoteWriter(path)
    try:
        yield writer
        writer.close()
    except BaseException:
        writer.abandon()
        raise

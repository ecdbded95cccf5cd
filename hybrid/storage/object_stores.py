"""Requests to object stores by the clients of ``pyarrow.fs``, with advice in error messages."""

from __future__ import annotations

import base64
import errno
import io
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from hybrid.errors import OutageError, StorageError, first_line
from hybrid.storage.remote_path import RemotePath, parse_options

if TYPE_CHECKING:
    from pyarrow import fs


# Attempts of a request. The client repeats only requests that are safe to repeat. Its pauses double, up to 20
# seconds.
ATTEMPTS = 7
RETRY_SECONDS = 60.0  # for Google's client, which has a time limit instead of ATTEMPTS
_CONNECT_SECONDS = 5.0
_SILENT_SECONDS = 10.0  # a connection without traffic for this long is closed
# The certificates of Debian, Red Hat, SUSE and Alpine. pyarrow's wheel knows only the path of the machine
# that built it.
_CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_UNTRUSTED = r"curlCode: (60|77)|CURL error \[(60|77)\]|certificate"  # in messages of clients
# For each kind of store: the variable that has the credentials, and the setting that has the address.
_NAMES = {
    "s3": (
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE,",
        "AWS_ENDPOINT_URL, or the host in the URL,",
    ),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS", "the store, or endpoint_override in the URL,"),
    "abfs": ("AZURE_STORAGE_KEY, or another variable of docs/storage.md,", "the account in the URL"),
    "hdfs": ("HADOOP_USER_NAME", "the host in the URL"),
}
_SAME_STORE = {"abfss": "abfs", "viewfs": "hdfs"}
_CREDENTIALS = "set {0} to credentials that may do this"
_ENDPOINT = "check that {1} is right and can be reached from here"
_CERTIFICATE = "its TLS certificate is not trusted; set {2} to a file that contains it"
_OVERLOADED = "the store is overloaded or down; try again later"
# Patterns in the texts of errors, each with a remedy; the first match is used.
_REMEDIES = (
    (
        r"NO_SUCH_BUCKET|BucketNotFound|NoSuchBucket|ContainerNotFound",
        "there is no such bucket; make it, or correct the URL",
    ),
    (r"NO_SUCH_UPLOAD|NoSuchUpload", "the store has dropped the unfinished upload; write it again"),
    (r"INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|ExpiredToken|InvalidToken", _CREDENTIALS),
    (r"ACCESS_DENIED|status (code: )?40[13]|\] 40[13] |permission|PermissionDenied", _CREDENTIALS),
    (r"Unauthenticated|AuthenticationException|OAuth2 access token|valid base64", _CREDENTIALS),
    (r"SLOW_DOWN|HTTP status (code: )?(5\d\d|429)|\] (5\d\d|429) ", _OVERLOADED),
    (r"INTERNAL_FAILURE|SERVICE_UNAVAILABLE|REQUEST_TIMEOUT", _OVERLOADED),
    (_UNTRUSTED, _CERTIFICATE),
    (r"NETWORK_CONNECTION|curlCode|CURL error|[Cc]ould(n't| not) resolve|onnect|Timeout", _ENDPOINT),
    (
        r"libjvm|libhdfs|JAVA_HOME",
        "HDFS needs Java and Hadoop's libhdfs; set JAVA_HOME, HADOOP_HOME and CLASSPATH",
    ),
)
# Text that is removed from messages: request ids, and internals of Google's client.
_NOISE = re.compile(
    r"\s*\(Request ID: [^)]*\)| error_info=\{.*|google::cloud::Status\(|\w+ error, with a last message of "
)
_MAX_UNSENT_BYTES = 4 << 20  # of a file that is sent by one request
_MAX_UNFLUSHED_BYTES = 64 << 20
_SHOW_INCOMPLETE_FILES = ("abfs", "hdfs")


@lru_cache
def _client(root: str, query: str, endpoint: str | None, process: int) -> tuple[fs.FileSystem, str]:
    """Return the client of a store for the process with id ``process``, and the prefix of paths in it."""
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
    settings = {
        "anonymous": options.get("anonymous") == "true",
        "region": options.get("region"),
        "scheme": options.get("scheme"),
        "endpoint_override": address,
        "force_virtual_addressing": options.get("force_virtual_addressing") == "true",
        "connect_timeout": _CONNECT_SECONDS,
        "request_timeout": _SILENT_SECONDS,
        "background_writes": False,  # a background writer would buffer without a limit
        "allow_delayed_open": True,  # a small file is written in one request, when it is closed
        "tls_ca_file_path": os.environ.get("AWS_CA_BUNDLE")
        or next(filter(os.path.isfile, _CERTIFICATES), None),
    }
    if address is not None and not address.startswith("http://") and options.get("scheme") != "http":
        # Without this request, the client would retry requests to an untrusted store for a minute.
        once = fs.S3FileSystem(**settings, retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1))
        try:
            once.get_file_info(bucket)
        except OSError as error:
            if re.search(_UNTRUSTED, str(error)):
                raise
    return fs.S3FileSystem(**settings, retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS))


def _azure_client(authority: str, options: dict[str, str]) -> tuple[fs.FileSystem, str]:
    from pyarrow import fs

    account, prefix, authorities = _split_azure_authority(authority)
    scheme = "http" if options.get("enable_tls") == "false" else "https"
    key = os.environ.get("AZURE_STORAGE_KEY") or None
    token = None if key else os.environ.get("AZURE_STORAGE_SAS_TOKEN") or None
    if key is not None:
        try:
            base64.b64decode(key, validate=True)
        except ValueError as error:  # Azure's client would end the process
            raise ValueError("AZURE_STORAGE_KEY is not valid base64") from error
    filesystem = fs.AzureFileSystem(
        account,
        account_key=key,
        sas_token=token,
        blob_storage_scheme=scheme,
        dfs_storage_scheme=scheme,
        **authorities,
    )
    if key is None and token is None:
        # A client without credentials ends the process if its first request is a read. Other requests fail.
        with suppress(OSError):
            filesystem.get_file_info(f"{prefix or 'any/'}any")
    return filesystem, prefix


def _split_azure_authority(authority: str) -> tuple[str, str, dict[str, str]]:
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


@contextmanager
def store_request(path: RemotePath, action: str) -> Iterator[tuple[fs.FileSystem, str]]:
    """Yield the client of a store, and the name that the client uses for ``path``, for one request.

    Error messages contain ``action``, a participle such as "read".

    Raises:
        FileNotFoundError: there is no such file, and ``action`` is not "written".
        StorageError: the store refuses the request, or the bucket is missing. The message has advice.
        OutageError: the store is overloaded, down or out of reach.
    """
    try:
        # The address of an S3 store that is not Amazon's, from the variables that Amazon's programs read.
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
        filesystem, prefix = _client(path.root, path.query, endpoint, os.getpid())
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
    remedies = (remedy for pattern, remedy in _REMEDIES if re.search(pattern, text))
    remedy = next(remedies, "docs/storage.md lists what a store needs")
    # A host may be unknown because its name server is down.
    kind = OutageError if remedy in (_OVERLOADED, _ENDPOINT) else StorageError
    names = (*_NAMES[_SAME_STORE.get(scheme, scheme)], "AWS_CA_BUNDLE" if scheme == "s3" else "SSL_CERT_FILE")
    reason = f"{_NOISE.sub('', text)}; {remedy.format(*names)}"
    return kind(f"{path}: cannot be {action}: {reason}", reason)


def list_store(filesystem: fs.FileSystem, key: str, is_deep: bool) -> list[fs.FileInfo]:
    """List a folder; [] if the folder is missing. Raise OSError if the bucket is missing.

    In Google's store, the list has the content of all subfolders, even if ``is_deep`` is False.
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
    """A file of a store, open for reading; opening and reading raise the errors of :func:`store_request`."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        with store_request(path, "read") as (filesystem, key):
            self._file = filesystem.open_input_file(key)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with store_request(self._path, "read"):
            return int(self._file.readinto(buffer))

    def readall(self) -> bytes:
        with store_request(self._path, "read"):
            return bytes(self._file.readall())

    def read_at(self, start: int, length: int) -> bytes:
        """Return ``length`` bytes from ``start`` on, fewer at the end of the file; thread-safe."""
        with store_request(self._path, "read"):
            return bytes(self._file.read_at(length, start))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class _RemoteWriter:
    """A file of a store, open for writing; the file becomes visible when the writer is closed.

    pyarrow cannot discard a stream: closing or deleting a stream completes its file. So a small file is sent
    only by :meth:`close`. A file is sent under a temporary name in two cases: if the store shows incomplete
    files, or if a large file replaces another.
    """

    def __init__(self, path: RemotePath) -> None:
        self.closed = False
        self._path = path
        self._unsent: list[bytes] = []
        self._num_bytes = self._num_unflushed = 0
        self._stream: Any = None
        self._sent_to = self._folder = ""  # the name of the stream's file, and its temporary folder, if any

    def write(self, content: bytes | memoryview, /) -> int:
        num_bytes = memoryview(content).nbytes
        self._num_bytes += num_bytes
        if self._num_bytes < _MAX_UNSENT_BYTES:
            self._unsent.append(bytes(content))
            return num_bytes
        with store_request(self._path, "written") as (filesystem, key):
            if self._stream is None:
                self._open(filesystem, key, filesystem.get_file_info(key).type.name != "NotFound")
            self._stream.write(content)
            self._num_unflushed += num_bytes
            if filesystem.type_name == "abfs" and self._num_unflushed >= _MAX_UNFLUSHED_BYTES:
                self._stream.flush()  # Azure's client buffers without a limit
                self._num_unflushed = 0
        return num_bytes

    def _open(self, filesystem: fs.FileSystem, key: str, is_replacement: bool = False) -> None:
        self._sent_to = key
        has_folder = filesystem.type_name in _SHOW_INCOMPLETE_FILES
        if is_replacement or has_folder:
            folder, _, name = key.rpartition("/")
            self._sent_to = f"{folder}/.{name}.{token_hex(4)}"
        if has_folder:
            self._folder = self._sent_to
            self._sent_to += "/part"
        # Without compression=None, pyarrow would compress by the suffix of the name.
        self._stream = filesystem.open_output_stream(self._sent_to, compression=None)
        self._stream.write(b"".join(self._unsent))

    def close(self) -> None:
        self.closed = True
        # An interrupt between two requests would complete an empty file. It reaches only the main thread.
        with ThreadPoolExecutor(1, "store") as thread:
            thread.submit(self._finish).result()

    def _finish(self) -> None:
        with store_request(self._path, "written") as (filesystem, key):
            if self._stream is None:
                self._open(filesystem, key)
            self._stream.close()
            if self._sent_to != key:
                publish = filesystem.move if filesystem.type_name == "hdfs" else filesystem.copy_file
                publish(self._sent_to, key)
                self._remove(filesystem)

    def _remove(self, filesystem: fs.FileSystem) -> None:
        if self._folder:
            filesystem.delete_dir(self._folder)
        else:
            filesystem.delete_file(self._sent_to)

    def abandon(self) -> None:
        """Remove the unfinished file from the store, if there is one."""
        if self._stream is None:
            return
        with suppress(OSError), store_request(self._path, "removed") as (filesystem, _):
            with suppress(OSError):
                self._stream.close()
            if self._folder or self._num_bytes >= _MAX_UNSENT_BYTES:
                self._remove(filesystem)


@contextmanager
def open_remote_writer(path: RemotePath) -> Iterator[_RemoteWriter]:
    """Open a file of a store for writing; after a failure, an existing file is unchanged."""
    writer = _RemoteWriter(path)
    try:
        yield writer
        writer.close()
    except BaseException:
        writer.abandon()
        raise

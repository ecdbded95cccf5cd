"""Paths of files of this machine, and URLs of object stores. Does no I/O, and does not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from hybrid.errors import StorageError

_SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_AZURE_OPTIONS = ("enable_tls",)
_OPTIONS = {  # allowed in the query of a URL; none of them is secret
    "s3": ("anonymous", "endpoint_override", "force_virtual_addressing", "region", "scheme"),
    "gs": ("anonymous", "endpoint_override", "scheme"),
    "abfs": _AZURE_OPTIONS,
    "abfss": _AZURE_OPTIONS,
}
_SECRET = re.compile(r"key|secret|token|password|credential|sas", re.IGNORECASE)
_REMEDY = "set them in the environment, such as AWS_ACCESS_KEY_ID (docs/storage.md)"


@dataclass(frozen=True, slots=True)
class RemotePath:
    """The path of a file or folder in a store, with some attributes of ``pathlib.Path``."""

    root: str  # the store: ``s3://bucket``
    key: str  # the name in the store, without leading and trailing slashes
    query: str = ""  # the options of the URL, none of which is secret

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.root, "/".join(filter(None, (self.key, name.strip("/")))), self.query)

    def __str__(self) -> str:
        return f"{self.root}/{quote(self.key)}" + (f"?{self.query}" if self.query else "")

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is not a path of this machine")

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.root, self.key.rpartition("/")[0], self.query)

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    def absolute(self) -> RemotePath:
        return self  # a URL does not depend on the working directory

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name


StoragePath: TypeAlias = Path | RemotePath
StoragePathT = TypeVar("StoragePathT", bound=StoragePath)


def is_url(text: str) -> bool:
    """Return whether a text is the URL of a store; a ``file://`` URL is not."""
    match = _URL.match(text)
    return match is not None and match[1].lower() != "file"


def parse_path(text: str | StoragePath) -> StoragePath:
    """Parse a path, a ``file://`` URL or a store's URL; StorageError if it is invalid or has credentials."""
    if not isinstance(text, str):
        return text
    match = _URL.match(text)
    if match is None:
        return Path(text)
    scheme = match[1].lower()
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise StorageError(f"{text}: is a file of another host; name one of this machine, file:///PATH")
        return Path(unquote(parts.path))
    # Not urlsplit, because a key may contain "#", which would end its path.
    rest, _, query = text[match.end() :].partition("?")
    if scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in _SCHEMES)
        raise StorageError(f"{text.partition('?')[0]}: has an unknown scheme; use a path, or one of {known}")
    authority, _, key = rest.partition("/")
    if not authority and scheme != "hdfs":
        raise StorageError(f"{scheme}://: names no bucket; write {scheme}://BUCKET/FOLDER")
    store = "gs" if scheme == "gcs" else scheme
    # URLs are printed, logged and kept in configurations, so they must not contain credentials.
    user, _, host = authority.rpartition("@")
    bare = f"{scheme}://{host}"
    if ":" in user or (user and store in ("s3", "gs")):
        raise StorageError(f"{bare}: contains credentials, and URLs are printed; {_REMEDY}")
    for name in parse_options(query):
        if _SECRET.search(name):
            raise StorageError(f"{bare}: contains {name}, and URLs are printed; {_REMEDY}")
        options = _OPTIONS.get(store)
        if options is not None and name not in options:
            raise StorageError(f"{bare}: has an unknown option {name}; the options are {', '.join(options)}")
    return RemotePath(f"{store}://{authority}", "/".join(filter(None, unquote(key).split("/"))), query)


def parse_options(query: str) -> dict[str, str]:
    return dict(parse_qsl(query, keep_blank_values=True))

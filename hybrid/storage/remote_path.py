"""Names of files and folders: a path of this machine, or a URL of a store. Free of torch and of I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from hybrid.errors import StorageError

SCHEMES = {
    "s3": "s3",
    "gs": "gs",
    "gcs": "gs",
    "abfs": "abfs",
    "abfss": "abfss",
    "hdfs": "hdfs",
    "viewfs": "viewfs",
}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# What URLs may say in their query; none of it is secret.
_AZURE_OPTIONS = ("enable_tls",)
_OPTIONS = {
    "s3": ("anonymous", "endpoint_override", "force_virtual_addressing", "region", "scheme"),
    "gs": ("anonymous", "endpoint_override", "scheme"),
    "abfs": _AZURE_OPTIONS,
    "abfss": _AZURE_OPTIONS,
}
_SECRET = re.compile(r"key|secret|token|password|credential|sas", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A file or folder in a store, named as a path is.

    Attributes:
        root: of the store: ``s3://bucket``.
        key: what follows the root's slash, as it is called there, without slashes at its ends.
        query: options of the URL; nothing secret.
    """

    root: str
    key: str
    query: str = ""

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.root, "/".join(filter(None, (self.key, name.strip("/")))), self.query)

    def __str__(self) -> str:
        return f"{self.root}/{quote(self.key)}" + (f"?{self.query}" if self.query else "")

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is no path of this machine")

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder that it is in."""
        return RemotePath(self.root, self.key.rpartition("/")[0], self.query)

    @property
    def suffix(self) -> str:
        """As of a path: from the last dot of its name on."""
        return Path(self.name).suffix

    def absolute(self) -> RemotePath:
        """Itself: it is the same place wherever it is asked for."""
        return self

    def with_name(self, name: str) -> RemotePath:
        """What has another name in the same folder."""
        return self.parent / name


StoragePath: TypeAlias = Path | RemotePath
StoragePathT = TypeVar("StoragePathT", bound=StoragePath)  # what is made of a path is a path


def is_url(text: str) -> bool:
    """Whether a text names a place in a store; ``file://`` is a path."""
    match = _URL.match(text)
    return match is not None and match[1].lower() != "file"


def parse_path(text: str | StoragePath) -> StoragePath:
    """The place that a text names: a path, or a URL of a store; a place is itself.

    Raises:
        StorageError: it is a URL that nobody here can read, or holds credentials.
    """
    if not isinstance(text, str):
        return text
    match = _URL.match(text)
    if match is None:
        return Path(text)
    scheme = match[1].lower()
    # By hand: a key may hold what urlsplit takes for the end of a path.
    rest, _, query = text[match.end() :].partition("?")
    if scheme == "file":
        return _file(text)
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise StorageError(
            f"{text.partition('?')[0]}: is no URL that can be read; one of {known} can, or a path"
        )
    authority, _, key = rest.partition("/")
    if not authority and scheme != "hdfs":
        raise StorageError(f"{scheme}://: names no bucket; write {scheme}://BUCKET/FOLDER")
    _refuse_credentials(scheme, authority, query)
    return RemotePath(
        f"{SCHEMES[scheme]}://{authority}", "/".join(filter(None, unquote(key).split("/"))), query
    )


def _file(text: str) -> Path:
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise StorageError(f"{text}: is a file of another host; name one of this machine, file:///PATH")
    return Path(unquote(parts.path))


def _refuse_credentials(scheme: str, authority: str, query: str) -> None:
    """A URL is printed, logged and kept in configurations: what is secret has no place in it."""
    bare = f"{scheme}://{authority.rpartition('@')[2]}"
    user = authority.rpartition("@")[0]
    if ":" in user or (user and scheme in ("s3", "gs", "gcs")):
        raise StorageError(f"{bare}: holds credentials, and URLs are printed; {_INSTEAD}")
    for name, _ in parse_qsl(query, keep_blank_values=True):
        if _SECRET.search(name):
            raise StorageError(f"{bare}: {name} in the URL, and URLs are printed; {_INSTEAD}")
        known = _OPTIONS.get(SCHEMES[scheme])
        if known is not None and name not in known:
            raise StorageError(f"{bare}: there is no option {name}; there are {', '.join(known)}")


def parse_options(query: str) -> dict[str, str]:
    """The options of a URL's query, by name."""
    return dict(parse_qsl(query, keep_blank_values=True))


_INSTEAD = "give them by the environment, such as AWS_ACCESS_KEY_ID (docs/storage.md)"

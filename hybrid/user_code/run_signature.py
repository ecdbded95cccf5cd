"""Signatures of user code, paths and URLs in the configuration of a run; does not import torch.

A run folder and its checkpoints contain the configuration of the run. The configuration may name modules,
which commands import, and files, folders and stores, which commands read and write. A command must not use
such values of another user's run unless its user allows it. So the program signs these values when it writes
a configuration, with a key that only the user can read.

Each value has a separate signature. The signatures are comments at the end of the file. So they are copied
with the file, and the user may edit all other keys.
"""

import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from hybrid.config import ClusterSection, RunConfig
from hybrid.config.loading import load_config, to_toml
from hybrid.config.sections import NETS
from hybrid.config.splits import PATH_KEYS
from hybrid.errors import ConfigError
from hybrid.storage.files import read_text
from hybrid.storage.private_files import private_user_folder
from hybrid.storage.remote_path import StoragePath

_PREFIX = "# signed by the user of this run: "
_KEY_BYTES = 32
_ALLOW = "and you have not signed it; check it, then allow it with --trust-code"


def signed_toml(config: RunConfig) -> str:
    """Return the configuration of a run as TOML, signed if the user has a private folder for a key."""
    text, entries = to_toml(config), [*_code_entries(config), *_path_entries(config)]
    if not entries or (key := _key()) is None:
        return text
    lines = (f"{_PREFIX}{_signature(key, *each)}\n" for each in entries)
    return f"{text}\n{''.join(lines)}"


def load_run_config(
    path: StoragePath, overrides: Sequence[str] = (), trust_code: bool = False, *, uses_paths: bool = False
) -> RunConfig:
    """Read the configuration of a run whose user code the caller will import.

    Args:
        overrides: see :func:`load_config`; these values need no signature.
        trust_code: whether the user trusts the run even if another user wrote it.
        uses_paths: whether the caller will also use paths and URLs of the configuration.

    Raises:
        ConfigError: this user has not signed a name of user code, or a path; or see :func:`load_config`.
    """
    config = load_config(path, overrides, is_stored=True)
    if trust_code:
        return config
    _refuse_unsigned(path, _code_entries(config), f"code to import and run, {_ALLOW}")
    chosen = {text.partition("=")[0].strip() for text in overrides}
    for each in _path_entries(config) if uses_paths else []:
        if each[0] not in chosen:
            remedy = f"or choose another (--resume: --set {each[0]}=...; evaluate and predict: --input)"
            _refuse_unsigned(path, [each], f"a path or address to use, {_ALLOW}, {remedy}")
    return config


def _code_entries(config: RunConfig) -> list[tuple[str, str]]:
    """Return the keys and values of a configuration that name user code."""
    entries = [] if config.dense.net_call.name in NETS else [("dense.net", config.dense.net)]
    for name, task in config.tasks.items():
        entries += [(f"tasks.{name}.loss", task.loss)] if ":" in task.loss else []
        entries += [(f"tasks.{name}.metrics", metric) for metric in task.metrics if ":" in metric]
    return entries


def _path_entries(config: RunConfig) -> list[tuple[str, str]]:
    """Return the keys and values of paths, URLs and addresses in a configuration, without defaults."""
    data, cluster, default = config.data, config.cluster, ClusterSection()
    entries = [
        *((PATH_KEYS[split], each) for split, paths in data.paths.items() for each in paths),
        ("data.cache_folder", data.cache_folder),
        ("data.local_cache_folder", data.local_cache_folder),
        ("cluster.secret_file", cluster.secret_file),
        *(("cluster.master", cluster.master),) * (cluster.master != default.master),
        *((f"tables.{name}.initial", table.initial) for name, table in config.tables.items()),
    ]
    return [(dotted, value) for dotted, value in entries if value]


def _refuse_unsigned(path: StoragePath, entries: Sequence[tuple[str, str]], rule: str) -> None:
    """Raise ConfigError for the first entry of the file ``path`` that this user has not signed."""
    lines = read_text(path).splitlines() if entries else []
    signatures = [line.removeprefix(_PREFIX).strip().encode() for line in lines if line.startswith(_PREFIX)]
    key = _key() if signatures else None
    for dotted, value in entries:
        expected = b"" if key is None else _signature(key, dotted, value).encode()
        if key is None or not any(hmac.compare_digest(each, expected) for each in signatures):
            raise ConfigError(dotted, f"{path} names {rule}", value)


def _signature(key: bytes, dotted: str, value: str) -> str:
    return hmac.new(key, f"{dotted} = {value}".encode(), "sha256").hexdigest()


def _key() -> bytes | None:
    """Return the user's key, created at first use; None if the user has no private folder."""
    folder = private_user_folder("XDG_STATE_HOME", ".local/state")
    if folder is None:
        return None
    file = folder / "key"
    try:
        if not file.exists():  # create the file atomically: of several concurrent runs, one succeeds
            descriptor, temporary = tempfile.mkstemp(dir=folder)  # with mode 0600
            try:
                with open(descriptor, "wb") as opened:
                    opened.write(secrets.token_bytes(_KEY_BYTES))
                with suppress(FileExistsError):  # another run has created the key
                    os.link(temporary, file)
            finally:
                os.unlink(temporary)
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        with open(descriptor, "rb") as opened:
            status = os.fstat(descriptor)
            key = opened.read(_KEY_BYTES + 1)
    except OSError:
        return None
    is_private = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return key if is_private and len(key) == _KEY_BYTES else None

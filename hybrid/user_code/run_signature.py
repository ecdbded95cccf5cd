"""Signatures of values in the configuration of a run; does not import torch.

Run folders and checkpoints contain the configuration of the run, which another user may have written. Values
that describe the model, the columns or the arithmetic are harmless. All other values decide what a command
does on this machine: modules to import, paths and URLs, hosts and interfaces, devices, and limits. Each key
declares its harmless values (:attr:`hybrid.config.key.Key.unsigned`). The default is always harmless.
When the program writes a configuration, it signs all other values with a key that only the user can read.

Each value has its own signature, in a comment at the end of the file. So a copy of the file has the
signatures, and an edited key does not invalidate the signatures of other keys.
"""

import hmac
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

from hybrid.config import RunConfig
from hybrid.config.key import Key
from hybrid.config.loading import key_values, load_config, to_toml
from hybrid.errors import ConfigError
from hybrid.storage.files import read_text
from hybrid.storage.private_files import private_user_folder
from hybrid.storage.remote_path import StoragePath

_PREFIX = "# signed by the user of this run: "
_KEY_BYTES = 32


def signed_toml(config: RunConfig) -> str:
    """Return the configuration of a run as TOML, with signatures if the user has a signing key."""
    entries = [
        (f"{section}.{name}", each)
        for section, name, key, value in key_values(config)
        for each in _elements_to_sign(key, value)
    ]
    text = to_toml(config)
    if not entries or (key := _key()) is None:
        return text
    lines = (f"{_PREFIX}{_signature(key, *each)}\n" for each in entries)
    return f"{text}\n{''.join(lines)}"


def load_run_config(
    path: StoragePath, overrides: Sequence[str] = (), trust_code: bool = False, *, uses: Collection[str] = ()
) -> RunConfig:
    """Read the configuration of a run that another user may have written.

    Replace a value that lacks a required signature by the default of its key. For two kinds of keys, raise
    ConfigError instead: keys in the sections ``uses``; and keys for which some values need no signature,
    such as ``dense.net``, because their defaults would change the model, a loss, a metric or a split.

    Args:
        overrides: ``section.key=value``; these values need no signature.
        trust_code: whether to accept all values without signatures.
        uses: the sections whose values the caller needs.

    Raises:
        ConfigError: a value of such a key lacks this user's signature, or the file or a value is invalid.
    """
    config = load_config(path, overrides, is_stored=True)
    if trust_code:
        return config
    chosen = {text.partition("=")[0].strip() for text in overrides}
    refused = {}
    for section, name, key, value in _unsigned_values(path, config):
        dotted = f"{section}.{name}"
        if dotted in chosen:
            continue
        if key.unsigned or section.partition(".")[0] in uses:
            refused[dotted] = value
        else:
            config = config.replace_value(section, name, key.default)
    if not refused:
        return config
    dotted, *others = refused
    nor = f" (nor {', '.join(others)})" if others else ""
    choices = f"--set {dotted}=... (--resume), --input (evaluate, predict)"
    rule = f"{path} has this value, and you have not signed it{nor}; choose another with {choices}"
    raise ConfigError(dotted, f"{rule}, or check this one, and allow it with --trust-code", refused[dotted])


def _unsigned_values(path: StoragePath, config: RunConfig) -> Iterator[tuple[str, str, Key, Any]]:
    """Yield section, name, key and first unsigned element of each value that lacks a required signature."""
    lines = read_text(path).splitlines()
    signatures = [line.removeprefix(_PREFIX).strip().encode() for line in lines if line.startswith(_PREFIX)]
    own = _key() if signatures else None
    for section, name, key, value in key_values(config):
        for element in _elements_to_sign(key, value):
            expected = b"" if own is None else _signature(own, f"{section}.{name}", element).encode()
            if own is None or not any(hmac.compare_digest(each, expected) for each in signatures):
                yield section, name, key, element
                break


def _elements_to_sign(key: Key, value: Any) -> list[Any]:
    """Return the elements of a value that need a signature. A value that is not a list is one element."""
    elements = value if key.is_list else [value]
    harmless = (key.default or ()) if key.is_list else [key.default]
    return [each for each in elements if each not in harmless and not re.fullmatch(key.unsigned, str(each))]


def _signature(key: bytes, dotted: str, value: Any) -> str:
    return hmac.new(key, f"{dotted} = {value}".encode(), "sha256").hexdigest()


def _key() -> bytes | None:
    """Return the user's signing key, created at first use; None if it cannot be made, read or trusted."""
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

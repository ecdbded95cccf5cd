"""Whether the code that a run's configuration names is the user's own choice. Free of torch.

A run keeps its configuration, and so does each of its checkpoints. It may name a net, losses or metrics of
the user's own, which whoever evaluates the run, or goes on with it, imports from the folder that he is in. So
the master signs such names as it writes a configuration, with a key that only its user can read, and what is
not signed with the key of the user who reads it is not imported unasked.

Each name is signed, and nothing else: the rest of a configuration is data, of which nothing runs. Signatures
are comments in the file. So they go where the configuration goes, and the user may edit what else is there.
"""

import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hybrid.config import RunConfig
from hybrid.config.loading import load_config, to_toml
from hybrid.config.sections import NETS
from hybrid.errors import ConfigError
from hybrid.storage.files import read_text
from hybrid.storage.private_files import own_folder
from hybrid.storage.remote_path import Place

_PREFIX = "# own code signed by the user of this run: "
_KEY_BYTES = 32


def signed_toml(config: RunConfig) -> str:
    """The configuration of a run as TOML text; signed where it names code, and there is a place for a key."""
    text, named = to_toml(config), _named_code(config)
    if not named or (key := _key()) is None:
        return text
    lines = (f"{_PREFIX}{_signature(key, *each)}\n" for each in named)
    return f"{text}\n{''.join(lines)}"


def load_run_config(path: Place, overrides: Sequence[str] = (), trust_code: bool = False) -> RunConfig:
    """Read the configuration of a run, of which code is to be imported.

    Args:
        overrides: see :func:`load_config`.
        trust_code: whether the user allows it, whosever the run is.

    Raises:
        ConfigError: it names code that this user has not signed; or as :func:`load_config`.
    """
    config = load_config(path, overrides, is_stored=True)
    named = [] if trust_code else _named_code(config)
    for dotted, code in named:
        if not _is_signed(path, dotted, code):
            rule = (
                f"{path} names this code, which would be imported and run, and you have not signed it; "
                "look at it, and then allow it with --trust-code"
            )
            raise ConfigError(dotted, rule, code)
    return config


def _named_code(config: RunConfig) -> list[tuple[str, str]]:
    """The code of the user's own that a configuration names, each with its key."""
    named = [] if config.dense.net in NETS else [("dense.net", config.dense.net)]
    for name, task in config.tasks.items():
        named += [(f"tasks.{name}.loss", task.loss)] if ":" in task.loss else []
        named += [(f"tasks.{name}.metrics", metric) for metric in task.metrics if ":" in metric]
    return named


def _is_signed(path: Place, dotted: str, code: str) -> bool:
    lines = read_text(path).splitlines()
    found = [line.removeprefix(_PREFIX).strip() for line in lines if line.startswith(_PREFIX)]
    if not found or (key := _key()) is None:
        return False
    expected = _signature(key, dotted, code).encode()
    return any(hmac.compare_digest(each.encode(), expected) for each in found)


def _signature(key: bytes, dotted: str, code: str) -> str:
    return hmac.new(key, f"{dotted} = {code}".encode(), "sha256").hexdigest()


def _key() -> bytes | None:
    """The user's key, made where there is none; None where there is no place that is the user's alone."""
    folder = own_folder("XDG_STATE_HOME", ".local/state")
    if folder is None:
        return None
    file = folder / "key"
    try:
        if not file.exists():
            _make(file)
        return _read(file)
    except OSError:
        return None


def _make(file: Path) -> None:
    """Write a new key; whole at once, and only one, though several runs may be at it."""
    descriptor, unfinished = tempfile.mkstemp(dir=file.parent)  # which its owner alone may read
    try:
        with open(descriptor, "wb") as opened:
            opened.write(secrets.token_bytes(_KEY_BYTES))
        os.link(unfinished, file)
    except FileExistsError:  # another run's
        pass
    finally:
        os.unlink(unfinished)


def _read(file: Path) -> bytes | None:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, "rb") as opened:
        status = os.fstat(descriptor)
        key = opened.read(_KEY_BYTES + 1)
    is_own = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return key if is_own and len(key) == _KEY_BYTES else None

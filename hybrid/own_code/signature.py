"""Whether the code that a run's configuration names is the user's own choice. Free of torch.

A run keeps its configuration, and so does each of its checkpoints. It may name a net of the user's own, which
whoever evaluates the run, or goes on with it, imports from the folder that he is in. So the master signs such
a name as it writes a configuration, with a key that only its user can read, and what is not signed with the
key of the user who reads it is not imported unasked.

The name is all that is signed: the rest of a configuration is data, of which nothing runs. The signature is a
comment in the file. So it goes where the configuration goes, and the user may edit what else is in there.
"""

import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hybrid.config import RunConfig
from hybrid.config.file import load_config, to_toml
from hybrid.config.sections import NETS
from hybrid.errors import ConfigError
from hybrid.private_files import own_folder

_PREFIX = "# dense.net signed by the user of this run: "
_KEY_BYTES = 32


def signed_toml(config: RunConfig) -> str:
    """The configuration of a run as TOML text; signed where it names code, and there is a place for a key."""
    text = to_toml(config)
    if config.dense.net in NETS or (key := _key()) is None:
        return text
    return f"{text}\n{_PREFIX}{_signature(key, config.dense.net)}\n"


def load_run_config(path: Path, overrides: Sequence[str] = (), trust_code: bool = False) -> RunConfig:
    """Read the configuration of a run, of which code is to be imported.

    Args:
        overrides: see :func:`load_config`.
        trust_code: whether the user allows it, whosever the run is.

    Raises:
        ConfigError: it names code that this user has not signed; or as :func:`load_config`.
    """
    config = load_config(path, overrides)
    net = config.dense.net
    if net not in NETS and not trust_code and not _is_signed(path, net):
        rule = (
            f"{path} names this code, which would be imported and run, and you have not signed it; "
            "look at it, and then allow it with --trust-code"
        )
        raise ConfigError("dense.net", rule, net)
    return config


def _is_signed(path: Path, net: str) -> bool:
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [line.removeprefix(_PREFIX).strip() for line in lines if line.startswith(_PREFIX)]
    return (
        bool(found)
        and (key := _key()) is not None
        and hmac.compare_digest(found[-1].encode(), _signature(key, net).encode())
    )


def _signature(key: bytes, net: str) -> str:
    return hmac.new(key, f"dense.net = {net}".encode(), "sha256").hexdigest()


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

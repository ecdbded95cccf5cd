"""Which run is resumed, and what it may change. Free of torch, so that a wrong key is refused at once."""

from collections.abc import Sequence

from hybrid.config import RunConfig
from hybrid.config.loading import CONFIG_FILE, fixed_values, load_config
from hybrid.config.sections import NAMED_KEYS
from hybrid.errors import ConfigError
from hybrid.storage import files
from hybrid.storage.remote_path import StoragePath, parse_path
from hybrid.user_code.run_signature import load_run_config
from workers.run_folder.run_paths import RESULT_FILE, runs_named

_LIMITS = ("epochs", "max_steps", "patience")  # keys of [train] that end a run


def load_resumed_config(run: StoragePath, overrides: Sequence[str], trust_code: bool = False) -> RunConfig:
    """Return the configuration of a run to resume, with overrides.

    Args:
        trust_code: whether the user trusts the run, whoever has written it.

    Raises:
        ConfigError: there is no run, the run names code or paths that the user has not signed, or an override
            changes the model or the data.
    """
    if not files.is_file(run / CONFIG_FILE):
        raise ConfigError("--resume", "contains no run", str(run))
    config = load_run_config(run / CONFIG_FILE, overrides, trust_code, uses_paths=True)
    check_same_model(run, config)
    return config


def check_same_model(run: StoragePath, config: RunConfig) -> None:
    """Raise ConfigError if ``config`` has another model or other data than ``run``."""
    before, now = fixed_values(load_config(run / CONFIG_FILE, is_stored=True)), fixed_values(config)
    for dotted in before | now:
        # A key of [tables.NAME] or [columns.NAME] without such a section has its default.
        kind, _, rest = dotted.partition(".")
        key = NAMED_KEYS.get(kind, {}).get(rest.rpartition(".")[2])
        default = None if key is None else key.default
        default = list(default) if isinstance(default, tuple) else default
        old, new = before.get(dotted, default), now.get(dotted, default)
        if old != new:
            raise ConfigError(dotted, f"the run to resume has {old!r}; keep that, or start a new run", new)


def newest_run(config: RunConfig) -> StoragePath | None:
    """Return run.folder, or the newest run of this name; None if there is no run."""
    folder = config.run.folder
    runs: list[StoragePath] = [parse_path(folder)] if folder else [*runs_named(config.run.name)]
    return next((run for run in runs if files.is_file(run / CONFIG_FILE)), None)


def is_finished(run: StoragePath, config: RunConfig) -> bool:
    """Return whether a run has finished, and ``config`` does not prolong it."""
    if not files.exists(run / RESULT_FILE):
        return False
    before, now = load_config(run / CONFIG_FILE, is_stored=True).train, config.train
    return all(getattr(before, key) == getattr(now, key) for key in _LIMITS)

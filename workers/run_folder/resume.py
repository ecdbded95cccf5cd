"""Which run goes on, and what it may change. Free of torch, so that a wrong key is refused at once."""

from collections.abc import Sequence

from hybrid.config import RunConfig
from hybrid.config.loading import CONFIG_FILE, fixed_values, load_config
from hybrid.config.sections import NAMED_KEYS
from hybrid.errors import ConfigError
from hybrid.storage import files
from hybrid.storage.remote_path import StoragePath, parse_path
from hybrid.user_code.run_signature import load_run_config
from workers.run_folder.run_paths import RESULT_FILE, runs_named

_LIMITS = ("epochs", "max_steps", "patience")  # keys of [train] that say when a run ends


def load_resumed_config(run: StoragePath, overrides: Sequence[str], trust_code: bool = False) -> RunConfig:
    """The configuration of a run that goes on: its own, with overrides.

    Args:
        trust_code: whether code that it names may be run though the user has not signed it.

    Raises:
        ConfigError: ``run`` holds no run, names code that may not be run, or an override is not of the same
            model and data.
    """
    if not files.is_file(run / CONFIG_FILE):
        raise ConfigError("--resume", "holds no run", str(run))
    config = load_run_config(run / CONFIG_FILE, overrides, trust_code, uses_paths=True)
    check_same_model(run, config)
    return config


def check_same_model(run: StoragePath, config: RunConfig) -> None:
    """ConfigError where ``run`` cannot go on with ``config``, since it has another model or other data."""
    before, now = fixed_values(load_config(run / CONFIG_FILE, is_stored=True)), fixed_values(config)
    for dotted in before | now:
        left_out = _left_out(dotted)
        then, wanted = before.get(dotted, left_out), now.get(dotted, left_out)
        if then != wanted:
            rule = f"the run to resume has {then!r}; keep that, or start a new run"
            raise ConfigError(dotted, rule, wanted)


def _left_out(dotted: str) -> object:
    """What a key of [tables.NAME] or [columns.NAME] comes to without such a section; else nothing."""
    kind, _, rest = dotted.partition(".")
    key = NAMED_KEYS.get(kind, {}).get(rest.rpartition(".")[2])
    default = None if key is None else key.default
    return list(default) if isinstance(default, tuple) else default


def newest_run(config: RunConfig) -> StoragePath | None:
    """The newest run of this name, or that in run.folder; None where there is none."""
    runs: list[StoragePath] = (
        [parse_path(config.run.folder)] if config.run.folder else [*runs_named(config.run.name)]
    )
    return next((run for run in runs if files.is_file(run / CONFIG_FILE)), None)


def is_finished(run: StoragePath, config: RunConfig) -> bool:
    """Whether a run has come to its end, and ``config`` asks for no other one."""
    if not files.exists(run / RESULT_FILE):
        return False
    before, now = (each.train for each in (load_config(run / CONFIG_FILE, is_stored=True), config))
    return all(getattr(before, key) == getattr(now, key) for key in _LIMITS)

"""Which run goes on, and what it may change. Free of torch, so that a wrong key is refused at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybrid.config import RunConfig
from hybrid.config.file import decisive_values, load_config
from hybrid.errors import ConfigError
from hybrid.own_code.signature import load_run_config
from workers.run_folder.paths import CONFIG_FILE, RESULT_FILE, runs_named

# What the tensors of a checkpoint depend on, and where in the data its step is.
_KEPT = {
    "run": ("seed",),
    "data": (
        *("format", "test_fraction", "label", "positive_labels", "negative_labels", "dense", "sparse"),
        *("multi_hot_separator", "missing", "numeric_transform", "standardise", "shuffle"),
        *("vocabulary", "vocabulary_min_count", "hash_rows", "synthetic_rows", "synthetic_test_rows"),
    ),
    "embedding": ("dim", "pooling", "optimizer"),
    "tables": ("dim", "pooling", "optimizer", "features"),
    "dense": ("net", "bottom_mlp", "top_mlp", "cross_layers", "remote_mlp", "optimizer"),
    "train": ("batch_size",),
}
_LEFT_OUT: dict[str, object] = {"features": []}  # what a table without a section has; else nothing


def resumed_config(run: Path, overrides: Sequence[str], trust_code: bool = False) -> RunConfig:
    """The configuration of a run that goes on: its own, with overrides.

    Args:
        trust_code: whether code that it names may be run though the user has not signed it.

    Raises:
        ConfigError: ``run`` holds no run, names code that may not be run, or an override is not of the same
            model and data.
    """
    if not (run / CONFIG_FILE).is_file():
        raise ConfigError("--resume", "holds no run", str(run))
    config = load_run_config(run / CONFIG_FILE, overrides, trust_code)
    check_same_model(run, config)
    return config


def check_same_model(run: Path, config: RunConfig) -> None:
    """ConfigError where ``run`` cannot go on with ``config``, since it has another model or other data."""
    before, now = decisive_values(load_config(run / CONFIG_FILE)), decisive_values(config)
    for dotted in (*before, *(key for key in now if key not in before)):
        section, _, name = dotted.rpartition(".")
        is_kept = name in _KEPT.get(section.partition(".")[0], ())
        then, wanted = (values.get(dotted, _LEFT_OUT.get(name)) for values in (before, now))
        if is_kept and then != wanted:
            rule = f"the run to resume has {then!r}; keep that, or start a new run"
            raise ConfigError(dotted, rule, wanted)


def unfinished_run(config: RunConfig) -> Path | None:
    """The newest run of this name, or that in run.folder, unless it has come to its end; None for none."""
    runs = [Path(config.run.folder)] if config.run.folder else runs_named(config.run.name)
    for run in runs:
        if (run / CONFIG_FILE).is_file() and not (run / RESULT_FILE).exists():
            return run
    return None

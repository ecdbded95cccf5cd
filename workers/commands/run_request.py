"""What several commands need: a configuration, a run to start or resume, the import of torch."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hybrid.config import RunConfig
from hybrid.config.loading import load_config
from hybrid.errors import ConfigError
from hybrid.storage.remote_path import StoragePath, parse_path
from workers.arguments import AUTO
from workers.console.messages import print_line
from workers.console.terminal import passing_status
from workers.exit_codes import Interrupt, exit_code
from workers.module_imports import importing_much
from workers.run_folder.resume import check_same_model, is_finished, load_resumed_config, newest_run
from workers.run_folder.run_paths import refuse_existing, run_path
from workers.run_folder.run_state import describe_saved_state


@contextmanager
def importing_torch() -> Iterator[None]:
    """Show a status line while the context imports torch, which takes seconds."""
    with passing_status() as say, importing_much():
        say("importing PyTorch")
        yield


def read_config(options: argparse.Namespace) -> RunConfig:
    """Return the configuration of the options."""
    return load_config(options.config, overrides(options))


def overrides(options: argparse.Namespace) -> list[str]:
    """Return the overrides of ``--set``, and of the options that stand for a key."""
    counts = {name: getattr(options, name, None) for name in ("trainers", "workers")}
    return [*options.set, *(f"cluster.{name}={n}" for name, n in counts.items() if n is not None)]


class RunRequest(NamedTuple):
    """The run to start or resume.

    Attributes:
        is_resumed: whether it is resumed.
        finished: the message for a finished run, for which nothing is to be done; else empty.
    """

    config: RunConfig
    folder: StoragePath
    is_resumed: bool
    finished: str = ""


def requested_run(options: argparse.Namespace) -> RunRequest:
    """Return the run that the options name, or a new one; ConfigError if it cannot be started."""
    if options.resume not in (None, AUTO):
        if options.config is not None:
            raise ConfigError("--resume", "uses the configuration of its run; use --set to change keys")
        run = parse_path(options.resume)
        return RunRequest(load_resumed_config(run, overrides(options), options.trust_code), run, True)
    config = read_config(options)
    newest = newest_run(config) if options.resume else None
    if newest is not None:
        check_same_model(newest, config)
        finished = ""
        if is_finished(newest, config):
            finished = f"{newest} has finished; raise train.epochs to go on, or start a run of another name"
        print_line(finished or f"resuming {newest}")
        return RunRequest(config, newest, True, finished)
    folder = run_path(config)
    refuse_existing(folder)
    if options.resume:
        print_line(f"no run of {config.run.name} yet; starting {folder}")
    if getattr(options, "script", None) is None:
        from hybrid.data.parse.sources import check_columns

        check_columns(config)
    return RunRequest(config, folder, False)


@contextmanager
def report_saved_state(folder: Path, command: str) -> Iterator[None]:
    """Add to an interrupt in the context what is saved of the run, and how to resume it."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        why = f": {interrupt}" if str(interrupt) else ""
        message = f"stopped{why}; {describe_saved_state(folder, command)}"
        raise Interrupt(exit_code(interrupt), message) from interrupt

"""Commands that start a whole cluster on this machine: launch, compare, run; and what all commands need."""

import argparse
import dataclasses
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hybrid.config import RunConfig
from hybrid.config.key import USER_FUNCTION
from hybrid.config.loading import load_config, validate
from hybrid.errors import ConfigError
from hybrid.storage.remote_path import StoragePath, parse_path
from workers.arguments import AUTO, COMPARED_DTYPE
from workers.cluster_task import CompareTask, FunctionTask, ScriptTask, TrainTask
from workers.console.messages import print_line
from workers.console.terminal import passing_status
from workers.exit_codes import Interrupt, exit_code
from workers.module_imports import importing_much
from workers.run_folder.run_access import hold_run, run_lock
from workers.run_folder.run_paths import refuse_existing, run_path, scratch_logs
from workers.run_folder.run_state import (
    check_same_model,
    describe_saved_state,
    is_finished,
    load_resumed_config,
    newest_run,
)


def launch_run(options: argparse.Namespace, started_at: float) -> None:
    """Train on a cluster, which is restarted if it fails."""
    from workers.launching.launcher import launch

    config, folder, is_resumed, finished = requested_run(options)
    if finished:
        return
    with hold_run(folder, is_resumed) as (local, lock), report_saved_state(local, options.command):
        launch(config, local, TrainTask(local, is_resumed, started_at), lock)


def compare(options: argparse.Namespace, started_at: float) -> None:
    """Train some steps on a cluster and in one process, and print the differences."""
    from workers.launching.launcher import launch

    if options.steps < 1:
        raise ConfigError("--steps", "must be at least 1", options.steps)
    config = read_config(options)
    dtype = options.dtype or (config.train.dtype if options.script else COMPARED_DTYPE)
    config = config.replace(train=dataclasses.replace(config.train, dtype=dtype))
    validate(config)
    if config.train.update == "async":
        rule = "must be sync or pipelined: the result of async depends on timing"
        raise ConfigError("train.update", rule, config.train.update)
    if config.embedding.wire_dtype != "rows":
        rule = "must be rows: one process sends nothing, so it rounds nothing"
        raise ConfigError("embedding.wire_dtype", rule, config.embedding.wire_dtype)
    with scratch_logs("hybrid-compare-") as folder, run_lock(folder) as lock:
        if options.script is None:
            from hybrid.data.parse.sources import check_columns

            check_columns(config)
            launch(config, folder, CompareTask(options.steps), lock)
        else:
            config = config.replace(train=dataclasses.replace(config.train, max_steps=options.steps))
            task = script_task(options.script, options.arguments)
            print_line("on a cluster")
            launch(config, folder, dataclasses.replace(task, snapshot=folder / "cluster"), lock)
            print_line("in one process")
            with importing_torch():
                from workers.jobs.comparison import compare_script

            compare_script(config, task.path, task.arguments, folder / "cluster")


def run(options: argparse.Namespace, started_at: float) -> None:
    """Run a script or a function of the user on a cluster."""
    from workers.launching.launcher import launch

    task: FunctionTask | ScriptTask
    if re.fullmatch(USER_FUNCTION, options.program):
        task = FunctionTask(options.program)
    else:
        task = script_task(options.program, options.arguments)
    config = read_config(options)
    with scratch_logs("hybrid-run-") as folder, run_lock(folder) as lock:
        launch(config, folder, task, lock)


def script_task(path: str, arguments: Sequence[str]) -> ScriptTask:
    """Return the task of a script; ConfigError if it is not a file."""
    if not Path(path).is_file():
        raise ConfigError("SCRIPT", "is not a file", path)
    return ScriptTask(path, tuple(arguments))


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

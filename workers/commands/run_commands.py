"""Commands that start a whole cluster on this machine: launch, compare, run."""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from hybrid.config import RunConfig
from hybrid.config.key import USER_FUNCTION
from hybrid.config.loading import validate
from hybrid.errors import ConfigError
from workers.arguments import COMPARED_DTYPE
from workers.cluster_task import CompareTask, FunctionTask, ScriptTask, TrainTask
from workers.commands.run_request import importing_torch, read_config, report_saved_state, requested_run
from workers.console.messages import print_line
from workers.run_folder.remote_run import hold_run
from workers.run_folder.run_lock import run_lock
from workers.run_folder.run_paths import scratch_logs


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
            _compare_script(config, dataclasses.replace(task, snapshot=folder / "cluster"), folder, lock)


def _compare_script(config: RunConfig, task: ScriptTask, folder: Path, lock: int) -> None:
    """Run a script on a cluster, then in this process, and print the differences."""
    from workers.launching.launcher import launch

    print_line("on a cluster")
    launch(config, folder, task, lock)
    print_line("in one process")
    with importing_torch():
        from workers.jobs.script_comparison import compare_script

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

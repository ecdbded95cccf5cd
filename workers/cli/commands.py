"""The commands of ``hybrid``. A command checks its arguments before it imports torch.

``NAME_command`` runs ``hybrid NAME``: it takes the options, and raises a HybridError if the command fails.
"""

import argparse
import dataclasses
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from hybrid.config import ClusterSection, RunConfig
from hybrid.config.key import USER_FUNCTION
from hybrid.config.loading import (
    CONFIG_FILE,
    apply_settings,
    describe,
    load_config,
    select_role_settings,
    to_toml,
    validate,
)
from hybrid.config.schema import json_schema
from hybrid.errors import ConfigError, HybridError
from hybrid.security.secret import VARIABLE, Secret
from hybrid.storage.folder_lock import folder_lock
from hybrid.storage.remote_path import StoragePath, parse_path
from hybrid.topology import MASTER, Role, RoleKind
from hybrid.user_code.run_signature import load_run_config
from workers.cli.arguments import AUTO, COMPARED_DTYPE, EXPORTS, STREAM
from workers.cli.scheduler_rank import end_with_scheduler, index_of, master_host, role_of
from workers.cluster_task import CompareTask, FunctionTask, ScriptTask, Task, TrainTask
from workers.console.messages import print_line, print_text
from workers.console.terminal import transient_status
from workers.exit_codes import Interrupt, ReportedError, exit_code
from workers.launching.launcher import launch
from workers.module_imports import fast_imports
from workers.rendezvous.host_setup import MasterAddress, allow_open_files
from workers.rendezvous.rendezvous_server import report_end
from workers.run_folder.run_access import (
    check_same_model,
    describe_saved_state,
    hold_run,
    is_finished,
    load_resumed_config,
    newest_run,
    refuse_existing,
    run_path,
    scratch_logs,
    script_folder,
)


def launch_command(options: argparse.Namespace) -> None:
    """Train on a cluster, which is restarted if it fails."""
    config, folder, is_resumed, end_message = _requested_run(options)
    if end_message:
        return
    with hold_run(folder, is_resumed) as (local, lock), _report_saved_state(local, options.command):
        launch(config, local, TrainTask(local, is_resumed, options.started_at), lock)


def compare_command(options: argparse.Namespace) -> None:
    """Train some steps on a cluster and in one process, and print the differences."""
    if options.steps < 1:
        raise ConfigError("--steps", "must be at least 1", options.steps)
    config = _read_config(options)
    dtype = options.dtype or (config.train.dtype if options.script else COMPARED_DTYPE)
    config = config.replace(train=dataclasses.replace(config.train, dtype=dtype))
    validate(config)
    if config.train.update == "async":
        rule = "must be sync or lookahead: the result of async depends on timing"
        raise ConfigError("train.update", rule, config.train.update)
    if config.embedding.wire_dtype != "rows":
        rule = "must be rows: one process sends nothing, so it rounds nothing"
        raise ConfigError("embedding.wire_dtype", rule, config.embedding.wire_dtype)
    with scratch_logs("hybrid-compare-") as folder, folder_lock(folder) as lock:
        if options.script is None:
            from hybrid.data.parse.sources import check_columns

            check_columns(config)
            launch(config, folder, CompareTask(options.steps), lock)
        else:
            config = config.replace(train=dataclasses.replace(config.train, max_steps=options.steps))
            task = _script_task(options.script, options.arguments)
            print_line("on a cluster")
            launch(config, folder, dataclasses.replace(task, snapshot=folder / "cluster"), lock)
            print_line("in one process")
            with importing_torch():
                from workers.jobs.comparison import compare_script

            compare_script(config, task.path, task.arguments, folder / "cluster")


def run_command(options: argparse.Namespace) -> None:
    """Run a script or a function of the user on a cluster."""
    task: FunctionTask | ScriptTask
    if re.fullmatch(USER_FUNCTION, options.program):
        task = FunctionTask(options.program)
    else:
        task = _script_task(options.program, options.arguments)
    config = _read_config(options)
    with scratch_logs("hybrid-run-") as folder, folder_lock(folder) as lock:
        if isinstance(task, ScriptTask):
            task = dataclasses.replace(task, scratch=folder)
        with _report_saved_state(folder, options.command):
            launch(config, folder, task, lock)


def _script_task(path: str, arguments: Sequence[str]) -> ScriptTask:
    """Return the task of a script; ConfigError if it is not a file."""
    if not Path(path).is_file():
        raise ConfigError("SCRIPT", "is not a file", path)
    return ScriptTask(path, tuple(arguments))


@contextmanager
def importing_torch() -> Iterator[None]:
    """Show a status line while the context imports torch, which takes seconds."""
    with transient_status() as report_progress, fast_imports():
        report_progress("importing PyTorch")
        yield


def _read_config(options: argparse.Namespace) -> RunConfig:
    return load_config(options.config, _overrides(options))


def _overrides(options: argparse.Namespace) -> list[str]:
    """Return the overrides of ``--set``, and of the options that stand for a key."""
    counts = {name: getattr(options, name, None) for name in ("trainers", "workers")}
    return [*options.set, *(f"cluster.{name}={n}" for name, n in counts.items() if n is not None)]


def _requested_run(options: argparse.Namespace) -> tuple[RunConfig, StoragePath, bool, str]:
    """Return the run that the options name, or a new one.

    Returns:
        The configuration; the folder; whether the run is resumed; and, if the run has finished already, a
        message that says so, else "".

    Raises:
        ConfigError: the run cannot be started.
    """
    if options.resume not in (None, AUTO):
        if options.config is not None:
            raise ConfigError("--resume", "uses the configuration of its run; use --set to change keys")
        run = parse_path(options.resume)
        return load_resumed_config(run, _overrides(options), options.trust_code), run, True, ""
    config = _read_config(options)
    newest = newest_run(config) if options.resume else None
    if newest is not None:
        check_same_model(newest, config)
        end_message = ""
        if is_finished(newest, config):
            end_message = f"{newest} has finished; raise train.epochs, or start a run with another run.name"
        print_line(end_message or f"resuming {newest}")
        return config, newest, True, end_message
    folder = run_path(config)
    refuse_existing(folder)
    if options.resume:
        print_line(f"no run of {config.run.name} yet; starting {folder}")
    if getattr(options, "script", None) is None:
        from hybrid.data.parse.sources import check_columns

        check_columns(config)
    return config, folder, False, ""


@contextmanager
def _report_saved_state(folder: Path, command: str) -> Iterator[None]:
    """Add to an interrupt in this block what the run has saved, and how to resume it."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if command == "run" and script_folder(folder) is None:
            raise
        reason = f": {interrupt}" if str(interrupt) else ""
        message = f"stopped{reason}; {describe_saved_state(folder, command)}"
        raise Interrupt(exit_code(interrupt), message) from interrupt


def master_command(options: argparse.Namespace) -> None:
    """Run the master of a cluster whose other roles are started by other commands."""
    end_with_scheduler()
    config, folder, is_resumed, end_message = _requested_run(options)
    secret = _shared_secret(config.cluster)
    if end_message:  # the other roles wait for a master
        report_end(config, secret, end_message)
        return
    allow_open_files(config.cluster)
    if options.script is not None:
        _lead(config, _script_task(options.script, ()), secret)
        return
    with hold_run(folder, is_resumed) as (local, _), _report_saved_state(local, options.command):
        _lead(config, TrainTask(local, is_resumed, options.started_at), secret)


def _lead(config: RunConfig, task: Task, secret: Secret) -> None:
    """Run a task as the master; an error has the exit code of the cluster."""
    with importing_torch():
        from workers import master

    code_of = master.exit_codes_of(task)
    try:
        master.run(config, task, secret)
    except HybridError as error:
        raise ReportedError(str(error), code_of(error)) from error


def role_command(options: argparse.Namespace) -> None:
    """Run the role that belongs to this process's rank; torchrun or srun sets the rank."""
    if None not in (options.trainers, options.workers):
        cluster = load_config(None, _overrides(options)).cluster
    elif options.resume in (None, AUTO):
        cluster = _read_config(options).cluster
    else:
        path = parse_path(options.resume) / CONFIG_FILE
        cluster = load_run_config(path, _overrides(options), options.trust_code, uses=["cluster"]).cluster
    role = role_of(os.environ, cluster.topology)
    address = _master_address(options)
    options.command, options.script = role.kind.value, None
    if role == MASTER:
        options.set += [f"cluster.master={address}"]
        master_command(options)
    else:
        options.index, options.master = role.index, str(address)
        options.set = [f"cluster.secret_file={cluster.secret_file}", *select_role_settings(options.set)]
        trainer_command(options)


def _master_address(options: argparse.Namespace) -> MasterAddress:
    """Return the address of ``--master``, or torchrun's MASTER_ADDR; torchrun's port is not used."""
    address: str = options.master or master_host(os.environ)
    if not address:
        raise ConfigError("--master", "must be given: HOST or HOST:PORT (torchrun sets MASTER_ADDR instead)")
    return MasterAddress.parse(address)


def trainer_command(options: argparse.Namespace) -> None:
    """Run a trainer or a worker, and end the process with the exit code of the cluster."""
    end_with_scheduler()
    kind = RoleKind(options.command)
    if options.index is None:
        options.index = index_of(os.environ, kind)
    address = _master_address(options)
    if options.index < 0:
        raise ConfigError("--index", "must be at least 0", options.index)
    secret = _shared_secret(apply_settings(RunConfig(), options.set).cluster)
    with importing_torch():
        from workers.rendezvous.bootstrap import serve

    print_line(f"waiting for the master at {address}")
    try:
        sys.exit(serve(Role(kind, options.index), address, secret, options.set))
    except HybridError as error:
        raise ReportedError(str(error), exit_code(error)) from error


worker_command = trainer_command


def _shared_secret(section: ClusterSection) -> Secret:
    secret = Secret.find(section.secret_file)
    if secret is None:
        rule = f"must be set, or {VARIABLE}, for roles started by hand; hybrid secret FILE creates a secret"
        raise ConfigError("cluster.secret_file", rule)
    return secret


def plan_command(options: argparse.Namespace) -> None:
    """Print the placement of tables, the traffic of a step, and memory."""
    config = _read_config(options)
    for name in ("hosts", "memory", "network", "ids"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name}", "must be more than 0, and finite", value)
    with importing_torch():
        from hybrid.data.prepare.preparation import cache_folder
        from workers.cli.planning import Hosts, print_plan

    hosts = Hosts(
        options.hosts,
        options.memory * 2**30 if options.memory else psutil.virtual_memory().total,
        options.network * 1e9 / 8,
    )
    print_plan(config, cache_folder(config), hosts, options.ids)


def evaluate_command(options: argparse.Namespace) -> None:
    with importing_torch():
        from workers.cli.model_commands import evaluate

    evaluate(options.run_folder, options.input, options.trust_code, options.module)


def predict_command(options: argparse.Namespace) -> None:
    if STREAM in options.input and len(options.input) > 1:
        rule = "stands for standard input, which cannot be combined with files; remove one of them"
        raise ConfigError("--input", rule, STREAM)
    with importing_torch():
        from workers.cli.model_commands import predict

    keep = [name for names in options.keep for name in names.split(",")]
    predict(options.run_folder, options.input, options.output, keep, options.trust_code, options.module)


def export_command(options: argparse.Namespace) -> None:
    """Write a run's model as files for other programs."""
    with importing_torch():
        from workers.cli.model_commands import export_run

    formats = options.format or EXPORTS[:1]
    source = options.trust_code, options.module
    export_run(options.run_folder, options.output, formats, options.dtype, *source)


def secret_command(options: argparse.Namespace) -> None:
    Secret.fresh().write(options.file)
    print_text(
        f"{options.file} holds a new secret. Start every role of the cluster with\n"
        f"    --set cluster.secret_file={options.file}\n"
        "or, if a host cannot read the file, after\n"
        f'    export {VARIABLE}="$(cat {options.file})"\n'
        "Protect it like a password: anybody who has the secret can run programs as you.\n"
    )


def config_command(options: argparse.Namespace) -> None:
    """Print the effective configuration, or a description of each key."""
    if options.schema:
        print_text(json_schema())
        return
    print_text(describe() if options.describe else to_toml(_read_config(options)))

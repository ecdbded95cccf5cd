"""The commands of ``hybrid``: ``NAME_command`` runs ``hybrid NAME``, and raises HybridError if it fails.

A command checks its arguments before it imports torch.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hybrid.config import ClusterSection, RunConfig, loading
from hybrid.config.key import toml_value
from hybrid.errors import ConfigError, DataError, HybridError
from hybrid.module_imports import fast_imports
from hybrid.security.secret import VARIABLE, Secret
from hybrid.storage import files
from hybrid.storage.file_formats import parse_json
from hybrid.storage.locked_folders import folder_lock
from hybrid.storage.remote_path import StoragePath, parse_path
from hybrid.topology import MASTER, Role, RoleKind, Topology
from hybrid.user_code.run_signature import load_run_config
from workers.cli.arguments import AUTO, COMPARED_DTYPE, EXPORTS, STREAM
from workers.cluster_task import CompareTask, ScriptTask, Task, TrainTask
from workers.console import json_text, print_line, print_text, transient_status
from workers.exit_codes import Interrupt, ReportedError, exit_code
from workers.launching.fork_server import end_with_parent
from workers.launching.launcher import launch, serving_metrics
from workers.rendezvous.host_setup import MasterAddress, allow_open_files
from workers.rendezvous.rendezvous_server import report_end
from workers.run_folder import run_access

TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by agents of torchrun for their processes
SLURM_STEP = "SLURM_STEP_ID"  # set by srun for its processes
_INDEX = "JOB_COMPLETION_INDEX"  # set by Kubernetes in the pods of an indexed job
_DIFFERENCES = "differences.json"  # in the scratch folder of compare
_BY_HAND = "start each role by its own command: hybrid master, hybrid trainer, hybrid worker"


class RequestedRun(NamedTuple):
    """The run that ``hybrid launch`` or ``hybrid master`` trains, or a finished run with ``end_message``."""

    config: RunConfig
    folder: StoragePath
    is_resumed: bool = False
    end_message: str = ""  # a message if the run has already finished


def launch_command(options: argparse.Namespace) -> None:
    """Train on a cluster, and restart the cluster if it fails. With ``--seeds``, train once for each seed."""
    with _json_output(options.json) as result:
        requests = [_requested_run(each) for each in _by_seed(options)]  # all are checked before training
        for run in requests:
            if not run.end_message:
                held = run_access.hold_run(run.folder, run.is_resumed)
                command = options.command if options.seeds is None else run_access.SWEEP
                with held as (local, lock), _report_saved_state(local, command):
                    launch(run.config, local, TrainTask(local, run.is_resumed, options.started_at), lock)
            options.started_at = time.time()
        if options.json or options.seeds:
            paths = [run.folder / run_access.RESULT_FILE for run in requests]
            try:
                results = [parse_json(files.read_bytes(path)) for path in paths]
            except ValueError as error:
                raise DataError(f"{', '.join(map(str, paths))}: one is damaged: {error}") from error
            result["runs"] = {str(path.parent): each for path, each in zip(paths, results, strict=True)}
        if options.seeds:
            from workers.run_folder.run_report import print_means

            result["metrics"] = print_means(requests[0].config, results)


def _by_seed(options: argparse.Namespace) -> Iterator[argparse.Namespace]:
    if options.seeds is None:
        yield options
        return
    if options.seeds < 2:
        raise ConfigError("--seeds", "must be at least 2, for a deviation", options.seeds)
    if options.resume not in (None, AUTO):
        raise ConfigError("--resume", f"must be {AUTO} with --seeds, which has several runs", options.resume)
    run = _read_config(options).run
    for seed in range(run.seed, run.seed + options.seeds):
        folder = str(parse_path(run.folder) / f"seed-{seed}") if run.folder else ""
        named = {"seed": seed, "name": f"{run.name}-seed-{seed}", "folder": folder}
        values = [f"run.{key}={toml_value(value)}" for key, value in named.items()]
        yield argparse.Namespace(**vars(options) | {"set": [*options.set, *values]})


def compare_command(options: argparse.Namespace) -> None:
    """Train some steps on a cluster and in one process, and print the differences."""
    if options.steps < 1:
        raise ConfigError("--steps", "must be at least 1", options.steps)
    config = _read_config(options)
    dtype = options.dtype or (config.train.dtype if options.script else COMPARED_DTYPE)
    config = config.replace(train=dataclasses.replace(config.train, dtype=dtype))
    loading.validate(config)
    if config.train.update == "async":
        rule = "must be sync or lookahead: the result of async depends on timing"
        raise ConfigError("train.update", rule, config.train.update)
    if config.embedding.wire_dtype != "rows":
        rule = "must be rows: one process sends nothing, so it rounds nothing"
        raise ConfigError("embedding.wire_dtype", rule, config.embedding.wire_dtype)
    with (
        run_access.scratch_logs("hybrid-compare-") as folder,
        folder_lock(folder) as lock,
        _json_output(options.json) as result,
    ):
        try:
            _compare(options, config, folder, lock)
        finally:
            if (file := folder / _DIFFERENCES).is_file():
                result |= json.loads(files.read_text(file))


def _compare(options: argparse.Namespace, config: RunConfig, folder: Path, lock: int) -> None:
    result = folder / _DIFFERENCES
    if options.script is None:
        from hybrid.data.parse.column_check import check_input_columns

        check_input_columns(config)
        launch(config, folder, CompareTask(options.steps, result), lock)
        return
    config = config.replace(train=dataclasses.replace(config.train, max_steps=options.steps))
    task = _script_task(options.script, options.arguments)
    print_line("on a cluster")
    launch(config, folder, dataclasses.replace(task, snapshot=folder / "cluster"), lock)
    print_line("in one process")
    with importing_torch():
        from workers.jobs.comparison import compare_script

    compare_script(config, task.path, task.arguments, folder / "cluster", result)


def run_command(options: argparse.Namespace) -> None:
    task, config = _script_task(options.program, options.arguments), _read_config(options)
    with (
        run_access.scratch_logs("hybrid-run-") as folder,
        folder_lock(folder) as lock,
        _report_saved_state(folder, options.command),
    ):
        launch(config, folder, dataclasses.replace(task, scratch=folder), lock)


def _script_task(path: str, arguments: Sequence[str]) -> ScriptTask:
    if not files.is_file(Path(path)):
        raise ConfigError("SCRIPT", "is not a file", path)
    return ScriptTask(path, tuple(arguments))


@contextmanager
def _json_output(is_json: bool) -> Iterator[dict[str, Any]]:
    """Yield a dictionary. If ``is_json``, print it as JSON at the end, and send other output to stderr."""
    result: dict[str, Any] = {}
    if not is_json:
        yield result
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield result
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
        if result:
            print_text(json_text(result))


@contextmanager
def importing_torch() -> Iterator[None]:
    """Show a status line while this block imports torch, which takes seconds."""
    with transient_status() as report_progress, fast_imports():
        report_progress("importing PyTorch")
        yield


def _read_config(options: argparse.Namespace) -> RunConfig:
    return loading.load_config(options.config, _overrides(options))


def _overrides(options: argparse.Namespace) -> list[str]:
    counts = {name: getattr(options, name, None) for name in ("trainers", "workers")}
    return [*options.set, *(f"cluster.{name}={n}" for name, n in counts.items() if n is not None)]


def _requested_run(options: argparse.Namespace) -> RequestedRun:
    """Return the run that ``--resume`` selects, or a new run; ConfigError if the run cannot be started."""
    if options.resume not in (None, AUTO):
        if options.config is not None:
            raise ConfigError("--resume", "uses the configuration of its run; use --set to change keys")
        run = parse_path(options.resume)
        config = run_access.load_resumed_config(run, _overrides(options), options.trust_code)
        return RequestedRun(config, run, is_resumed=True)
    config = _read_config(options)
    newest = run_access.newest_run(config) if options.resume else None
    if newest is not None:
        run_access.check_same_model(newest, config)
        end_message = ""
        if run_access.is_finished(newest, config):
            more = "for new units, name it in --resume" if config.data.is_stream else "raise train.epochs"
            end_message = f"{newest} has finished; {more}, or start a run in another run.folder"
        print_line(end_message or f"resuming {newest}")
        return RequestedRun(config, newest, True, end_message)
    folder = run_access.run_path(config)
    run_access.refuse_existing(folder)
    if options.resume:
        print_line(f"no run of {config.run.name} yet; starting {folder}")
    from hybrid.data.parse.column_check import check_input_columns

    check_input_columns(config)
    return RequestedRun(config, folder)


@contextmanager
def _report_saved_state(folder: Path, command: str) -> Iterator[None]:
    """If this block is interrupted, raise an Interrupt that names the saved step and how to resume."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if command == "run" and run_access.script_checkpoints(folder) is None:
            raise
        reason = f": {interrupt}" if str(interrupt) else ""
        message = f"stopped{reason}; {run_access.describe_saved_state(folder, command)}"
        raise Interrupt(exit_code(interrupt), message) from interrupt


def master_command(options: argparse.Namespace) -> None:
    """Run the master of a cluster whose other roles are started by other commands."""
    end_with_scheduler()
    if options.script is not None:
        if options.resume not in (None, AUTO):
            rule = "cannot be combined with --script; cluster.resume in the script resumes it"
            raise ConfigError("--resume", rule, options.resume)
        task, config = _script_task(options.script, options.arguments), _read_config(options)
        secret = _shared_secret(config.cluster)
        allow_open_files(config.cluster)
        _run_master(config, task, secret)
        return
    run = _requested_run(options)
    secret = _shared_secret(run.config.cluster)
    if run.end_message:  # the other roles wait for a master
        report_end(run.config, secret, run.end_message)
        return
    allow_open_files(run.config.cluster)
    with (
        run_access.hold_run(run.folder, run.is_resumed) as (local, _),
        _report_saved_state(local, options.command),
        serving_metrics(run.config.cluster, local),
    ):
        _run_master(run.config, TrainTask(local, run.is_resumed, options.started_at), secret)


def _run_master(config: RunConfig, task: Task, secret: Secret) -> None:
    """Run a task as the master; turn a HybridError into a ReportedError with the cluster's exit code."""
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
        # Other keys may need those of the file, which only the master reads.
        of_cluster = [each for each in _overrides(options) if each.startswith("cluster.")]
        cluster = loading.load_config(None, of_cluster).cluster
    elif options.resume in (None, AUTO):
        cluster = _read_config(options).cluster
    else:
        path = parse_path(options.resume) / loading.CONFIG_FILE
        cluster = load_run_config(path, _overrides(options), options.trust_code, uses=["cluster"]).cluster
    role = role_of(os.environ, cluster.topology)
    address = _master_address(options)
    options.command = role.kind.value
    if role == MASTER:
        options.set += [f"cluster.master={address}"]
        master_command(options)
    else:
        options.index, options.master = role.index, str(address)
        settings = loading.select_role_settings(options.set)
        options.set = [f"cluster.secret_file={cluster.secret_file}", *settings]
        trainer_command(options)


def _master_address(options: argparse.Namespace) -> MasterAddress:
    address: str = options.master or master_host(os.environ)
    if not address:
        raise ConfigError("--master", "must be given: HOST or HOST:PORT (torchrun sets MASTER_ADDR instead)")
    return MasterAddress.parse(address)


def trainer_command(options: argparse.Namespace) -> None:
    """Run a trainer or worker, as ``options.command`` selects; exit with the exit code of the cluster."""
    end_with_scheduler()
    kind = RoleKind(options.command)
    if options.index is None:
        options.index = index_of(os.environ, kind)
    address = _master_address(options)
    if options.index < 0:
        raise ConfigError("--index", "must be at least 0", options.index)
    secret = _shared_secret(loading.apply_settings(RunConfig(), options.set).cluster)
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
    config = _read_config(options)
    for name in ("hosts", "memory", "network", "ids"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name}", "must be more than 0, and finite", value)
    with importing_torch():
        from workers.cli.planning import Hosts, print_plan

    memory = options.memory * 2**30 if options.memory else psutil.virtual_memory().total
    hosts = Hosts(options.hosts, memory, options.network * 1e9 / 8)
    with _json_output(options.json) as result:
        result |= print_plan(config, hosts, options.ids)


def evaluate_command(options: argparse.Namespace) -> None:
    with importing_torch():
        from workers.cli.model_commands import evaluate

    with _json_output(options.json) as result:
        result |= evaluate(options.run_folder, options.input, options.trust_code, options.module)


def predict_command(options: argparse.Namespace) -> None:
    if STREAM in options.input and len(options.input) > 1:
        rule = "stands for standard input, which cannot be combined with files; remove one of them"
        raise ConfigError("--input", rule, STREAM)
    if options.json and options.output == Path(STREAM):
        raise ConfigError("--json", "needs --output, since standard output has the predictions")
    with importing_torch():
        from workers.cli.model_commands import predict

    keep = [name for names in options.keep for name in names.split(",")]
    run, source = options.run_folder, (options.trust_code, options.module)
    with _json_output(options.json) as result:
        result |= predict(run, options.input, options.output, keep, *source, top_k=options.top_k)


def report_command(options: argparse.Namespace) -> None:
    from workers.run_folder.run_files import read_run
    from workers.run_folder.run_report import report_page

    try:
        page = report_page([read_run(folder) for folder in options.run_folders])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        names = ", ".join(map(str, options.run_folders))
        raise DataError(f"{names}: a file has another form than those of this version ({error})") from error
    with run_access.run_write_errors(options.output, run_access.OTHER_OUTPUT):
        files.write_bytes(options.output, page.encode())
    print_line(f"report  {options.output}")


def export_command(options: argparse.Namespace) -> None:
    with importing_torch():
        from workers.cli.model_commands import export_followed, export_run

    formats = options.format or EXPORTS[:1]
    if options.follow:
        for name, value in (("--module", options.module), ("--dtype", options.dtype)):
            if value is not None:
                raise ConfigError(name, "cannot be combined with --follow", value)
        export_followed(options.run_folder, options.output, formats, options.trust_code)
        return
    export_run(options.run_folder, options.output, formats, options.dtype, options.trust_code, options.module)


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
    if options.schema:
        print_text(loading.json_schema())
        return
    print_text(loading.describe() if options.describe else loading.to_toml(_read_config(options)))


def role_of(environment: Mapping[str, str], topology: Topology) -> Role:
    """Return the role of a process by its rank: 0 is the master, then trainers, then workers.

    ConfigError if the variables of torchrun or srun are missing or inconsistent, or do not fit ``topology``.
    """
    ranks: dict[str, tuple[int, int]] = {}
    if "RANK" in environment:
        ranks["RANK and WORLD_SIZE"] = _integer(environment, "RANK"), _integer(environment, "WORLD_SIZE")
    if SLURM_STEP in environment and TORCHRUN not in environment:
        size = _integer(environment, "SLURM_STEP_NUM_TASKS")
        ranks["SLURM_PROCID and SLURM_STEP_NUM_TASKS"] = _integer(environment, "SLURM_PROCID"), size
    if not ranks:
        rule = f"needs RANK and WORLD_SIZE, or SLURM_PROCID of srun, and none is set; {_BY_HAND}"
        raise ConfigError("role", rule)
    found = " but ".join(f"{names} say {rank} of {size}" for names, (rank, size) in ranks.items())
    if len(set(ranks.values())) > 1:
        raise ConfigError("role", f"{found}; {_BY_HAND}")
    rank, size = next(iter(ranks.values()))
    if size != topology.world_size or not 0 <= rank < size:
        rule = (
            f"{found}, but {topology} are {topology.world_size} processes (some platforms, such as PAI-DLC "
            f"and Baidu's, set RANK once per node); {_BY_HAND}"
        )
        raise ConfigError("role", rule)
    return topology.roles[rank]


def index_of(environment: Mapping[str, str], kind: RoleKind) -> int:
    """Return the index that Kubernetes gives the pod of a role; ConfigError outside an indexed job."""
    if _INDEX not in environment:
        rule = f"must be given: the index of the {kind}, from 0 (Kubernetes sets {_INDEX} in indexed jobs)"
        raise ConfigError("--index", rule)
    return _integer(environment, _INDEX)


def _integer(environment: Mapping[str, str], name: str) -> int:
    if name not in environment:
        raise ConfigError("role", f"{name} is not set; {_BY_HAND}")
    try:
        return int(environment[name])
    except ValueError as error:
        raise ConfigError(name, "must be an integer", environment[name]) from error


def master_host(environment: Mapping[str, str]) -> str:
    """Return the host of rank 0 under torchrun, else ""."""
    return environment.get("MASTER_ADDR", "") if TORCHRUN in environment else ""


def end_with_scheduler() -> None:
    """Under torchrun or srun, make the system kill this process when its parent process ends."""
    if TORCHRUN in os.environ or SLURM_STEP in os.environ:
        end_with_parent(os.getppid())

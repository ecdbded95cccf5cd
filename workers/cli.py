"""The command line. Nothing here imports torch before the command is known and its arguments are right."""

import argparse
import dataclasses
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from hybrid.config import RunConfig
from hybrid.config.file import load_config, to_toml, validate
from hybrid.config.key import OWN_FUNCTION
from hybrid.config.page import describe
from hybrid.errors import ConfigError, HybridError
from hybrid.topology import MASTER, Role, RoleKind
from hybrid.trust.secret import VARIABLE, Secret
from workers.arguments import AUTO, COMPARED_DTYPE, EXPORTS, parse
from workers.joining.alarm import FAILED, INTERRUPTED
from workers.launching.imports import lasting_imports
from workers.launching.open_files import allow_open_files
from workers.run_folder.paths import refuse_existing, run_path, scratch_logs
from workers.run_folder.resume import check_same_model, resumed_config, unfinished_run
from workers.run_folder.run_lock import run_lock
from workers.run_folder.run_state import left_behind
from workers.screen.lasting_output import lasting_output
from workers.screen.terminal import passing_status
from workers.screen.visible import visible
from workers.search_path import search_here_last
from workers.stopping import STOP_SIGNALS
from workers.task import CompareTask, OwnTask, ScriptTask, TrainTask
from workers.torch_cache import choose_torch_cache


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exits with 0, 1 (failed, with one line on stderr), 2 (usage) or 130 (interrupted)."""
    started_at = time.time()
    # torch's C++ side logs every broken connection with a stack; the roles say it in one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    search_here_last()  # where a user's own net (dense.net = module:function) is
    options = parse(arguments)
    if options.command not in _WITHOUT_TORCH:
        choose_torch_cache()
    goes_on = options.command in _RUNS
    try:
        with lasting_output(_name(options), goes_on=goes_on) as losses:
            _run_interruptibly(options, started_at)
        if losses.any and not goes_on:
            sys.exit(FAILED)
    except HybridError as error:
        sys.exit(f"{_name(options)}: {visible(' '.join(str(error).split()))}")


def _run_interruptibly(options: argparse.Namespace, started_at: float) -> None:
    try:
        with _interruptible():
            _COMMANDS[options.command](options, started_at)
    except KeyboardInterrupt as interrupt:
        print(f"{_name(options)}: {visible(str(interrupt)) or 'interrupted'}", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _name(options: argparse.Namespace) -> str:
    """What speaks in an error message, such as ``hybrid trainer 1``."""
    index = getattr(options, "index", None)
    return f"hybrid {options.command}" + ("" if index is None else f" {index}")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make SIGTERM and SIGHUP stop the command as Ctrl-C does, once: the way out is not interrupted."""

    def interrupt(signum: int, frame: object) -> None:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    # What is ignored already, as SIGHUP is under nohup, stays so.
    previous = {
        each: handler for each in STOP_SIGNALS if (handler := signal.getsignal(each)) != signal.SIG_IGN
    }
    for each in previous:
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


@contextmanager
def _imports() -> Iterator[None]:
    """What imports torch, which takes seconds."""
    with passing_status() as say, lasting_imports():
        say("importing PyTorch")
        yield


def _read_config(options: argparse.Namespace) -> RunConfig:
    counts = {name: getattr(options, name, None) for name in ("trainers", "workers")}
    given = [f"cluster.{name}={count}" for name, count in counts.items() if count is not None]
    return load_config(options.config, [*options.set, *given])


def _wanted_run(options: argparse.Namespace) -> tuple[RunConfig, Path, bool]:
    """The configuration and the folder of the run that is to be, and whether it goes on."""
    if options.resume not in (None, AUTO):
        if options.config is not None:
            raise ConfigError(
                "--resume", "goes on with the configuration of its run; use --set to change keys"
            )
        run = Path(options.resume)
        return resumed_config(run, options.set, options.trust_code), run, True
    config = _read_config(options)
    unfinished = unfinished_run(config) if options.resume else None
    if unfinished is not None:
        check_same_model(unfinished, config)
        print(visible(f"going on with {unfinished}"), flush=True)
        return config, unfinished, True
    folder = run_path(config)
    refuse_existing(folder)
    if options.resume:
        print(visible(f"no unfinished run of {config.run.name}; starting {folder}"), flush=True)
    return config, folder, False


@contextmanager
def _going_on_later(folder: Path, command: str) -> Iterator[None]:
    """Have the interrupt of a run in here say what is saved of it, and how it goes on."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        why = f": {interrupt}" if str(interrupt) else ""
        raise KeyboardInterrupt(f"stopped{why}; {left_behind(folder, command)}") from interrupt


def _launch(options: argparse.Namespace, started_at: float) -> None:
    from workers.launching.launch import launch

    config, folder, is_resumed = _wanted_run(options)
    with _going_on_later(folder, options.command):
        launch(config, folder, TrainTask(folder, is_resumed, started_at))


def _compare(options: argparse.Namespace, started_at: float) -> None:
    from workers.launching.launch import launch

    if options.steps < 1:
        raise ConfigError("--steps", "must be at least 1", options.steps)
    config = _read_config(options)
    dtype = options.dtype or (config.train.dtype if options.script else COMPARED_DTYPE)
    config = config.replace(train=dataclasses.replace(config.train, dtype=dtype))
    validate(config)
    if config.train.update == "async":
        rule = "must be sync or pipelined: what async comes to depends on who is quick"
        raise ConfigError("train.update", rule, config.train.update)
    if config.embedding.wire_dtype != "rows":
        rule = "must be rows: one process sends nothing, and rounds nothing"
        raise ConfigError("embedding.wire_dtype", rule, config.embedding.wire_dtype)
    with scratch_logs("hybrid-compare-") as folder:
        if options.script is None:
            launch(config, folder, CompareTask(options.steps))
        else:
            config = config.replace(train=dataclasses.replace(config.train, max_steps=options.steps))
            task = _script_task(options.script, options.arguments)
            _compare_script(config, dataclasses.replace(task, snapshot=folder / "cluster"), folder)


def _compare_script(config: RunConfig, task: ScriptTask, folder: Path) -> None:
    """Run a script on a cluster, then in this process, and print what differs."""
    from workers.launching.launch import launch

    print("on a cluster", flush=True)
    launch(config, folder, task)
    print("in one process", flush=True)
    with _imports():
        from workers.offline.script_comparison import compare_script

    compare_script(config, task.path, task.arguments, folder / "cluster")


def _run(options: argparse.Namespace, started_at: float) -> None:
    from workers.launching.launch import launch

    task: OwnTask | ScriptTask
    if re.fullmatch(OWN_FUNCTION, options.program):
        task = OwnTask(options.program)
    else:
        task = _script_task(options.program, options.arguments)
    config = _read_config(options)
    with scratch_logs("hybrid-run-") as folder:
        launch(config, folder, task)


def _script_task(path: str, arguments: Sequence[str]) -> ScriptTask:
    if not Path(path).is_file():
        raise ConfigError("SCRIPT", "is not a file", path)
    return ScriptTask(path, tuple(arguments))


def _role(options: argparse.Namespace, started_at: float) -> None:
    kind = RoleKind(options.command)
    if kind is RoleKind.MASTER:
        config, folder, is_resumed = _wanted_run(options)
    else:
        config = _read_config(options)
        folder, is_resumed = run_path(config), False
    if not config.cluster.master_port:
        raise ConfigError("cluster.master_port", "must be set, the same for every role started by hand")
    role = MASTER if kind is RoleKind.MASTER else Role(kind, options.index)
    if role not in config.cluster.topology.roles:
        raise ConfigError("--index", f"there is no {role} in a cluster of {config.cluster.topology}")
    secret = Secret.find(config.cluster.secret_file)
    if secret is None:
        rule = f"must be set, or {VARIABLE}, for roles started by hand; hybrid secret FILE makes one"
        raise ConfigError("cluster.secret_file", rule)
    allow_open_files(config.cluster)
    with _imports():
        from workers.roles.run import run_role

    task = TrainTask(folder, is_resumed, started_at)
    if options.script is not None and role == MASTER:
        run_role(role, config, _script_task(options.script, ()), secret)
    elif role == MASTER:
        with _going_on_later(folder, options.command), run_lock(folder):
            run_role(role, config, task, secret)
    else:
        section = config.cluster
        print(f"waiting for the master at {section.master_address}:{section.master_port}", flush=True)
        run_role(role, config, task, secret)


def _plan(options: argparse.Namespace, started_at: float) -> None:
    config = _read_config(options)
    for name in ("hosts", "cores", "memory", "network", "ids"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name}", "must be more than 0, and finite", value)
    with _imports():
        from hybrid.data.prepared import cache_folder
        from workers.offline.placement import print_plan
        from workers.offline.planning.costs import MEASURED, Costs
        from workers.offline.planning.forecast import Hosts

    hosts = Hosts(
        options.hosts,
        options.cores or len(os.sched_getaffinity(0)),
        options.memory * 2**30 if options.memory else psutil.virtual_memory().total,
        options.network * 1e9 / 8,
    )
    print_plan(config, cache_folder(config), hosts, Costs.read(options.costs or MEASURED), options.ids)


def _evaluate(options: argparse.Namespace, started_at: float) -> None:
    with _imports():
        from workers.offline.predictions import evaluate

    evaluate(options.run_folder, options.input, options.trust_code)


def _predict(options: argparse.Namespace, started_at: float) -> None:
    with _imports():
        from workers.offline.predictions import predict

    keep = [name for names in options.keep for name in names.split(",")]
    predict(options.run_folder, options.input, options.output, keep, options.trust_code)


def _export(options: argparse.Namespace, started_at: float) -> None:
    with _imports():
        from hybrid.serving.name_map import NameMap
        from workers.offline.exporting import export_run

    formats = options.format or EXPORTS[:1]
    if options.map and "tables" not in formats:
        raise ConfigError("--map", "names tables in their file; ask for it by --format tables")
    names = NameMap.parse(options.map)
    export_run(options.run_folder, options.output, formats, options.dtype, names, options.trust_code)


def _import(options: argparse.Namespace, started_at: float) -> None:
    with _imports():
        from hybrid.serving.name_map import NameMap
        from workers.offline.importing import import_tables

    import_tables(options.source, options.into, options.output, NameMap.parse(options.map))


def _secret(options: argparse.Namespace, started_at: float) -> None:
    Secret.fresh().write(options.file)
    print(
        f"{options.file} holds a new secret. Start every role of the cluster with\n"
        f"    --set cluster.secret_file={options.file}\n"
        "or, where it cannot see the file, after\n"
        f'    export {VARIABLE}="$(cat {options.file})"\n'
        "Keep it as you keep a password: whoever has it can run programs as you."
    )


def _config(options: argparse.Namespace, started_at: float) -> None:
    print(describe() if options.describe else to_toml(_read_config(options)), end="")


_WITHOUT_TORCH = ("config", "secret")
_RUNS = ("launch", "compare", "run", *(kind.value for kind in RoleKind))
_COMMANDS = {
    "launch": _launch,
    "compare": _compare,
    "run": _run,
    **{kind.value: _role for kind in RoleKind},
    "plan": _plan,
    "evaluate": _evaluate,
    "predict": _predict,
    "export": _export,
    "import": _import,
    "config": _config,
    "secret": _secret,
}

"""The command line. Nothing here imports torch before the command is known and its arguments are right."""

import argparse
import dataclasses
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from hybrid.config import ClusterSection, RunConfig
from hybrid.config.file import CONFIG_FILE, load_config, own_settings, to_toml, validate, with_own
from hybrid.config.key import OWN_FUNCTION
from hybrid.config.page import describe
from hybrid.errors import ConfigError, HybridError
from hybrid.storage.places import Place, place
from hybrid.topology import MASTER, Role, RoleKind
from hybrid.trust.secret import VARIABLE, Secret
from workers.arguments import AUTO, COMPARED_DTYPE, EXPORTS, STREAM, parse
from workers.endings import ExitCode, Interrupt, ToldError, exit_code
from workers.joining.address import Address
from workers.joining.dismissal import dismiss
from workers.joining.open_files import allow_open_files
from workers.launching.forking import end_with_parent
from workers.launching.identity import ends_with_starter, index_of, master_host, role_of
from workers.launching.imports import lasting_imports
from workers.run_folder.paths import refuse_existing, run_path, scratch_logs
from workers.run_folder.resume import check_same_model, is_over, newest_run, resumed_config
from workers.run_folder.run_lock import run_lock
from workers.run_folder.run_state import left_behind
from workers.run_folder.stored_run import held_folder
from workers.screen.lasting_output import lasting_output
from workers.screen.terminal import passing_status
from workers.screen.visible import visible
from workers.search_path import search_here_last
from workers.stopping import ASK_SIGNAL, HEARD
from workers.task import CompareTask, OwnTask, ScriptTask, TrainTask
from workers.torch_cache import choose_torch_cache


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exits with a code of :class:`workers.endings.ExitCode`, and a line on stderr."""
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
            sys.exit(ExitCode.FAILED)
    except HybridError as error:
        code = exit_code(error, has_stepped=False)
        if code is ExitCode.FAILED:
            sys.exit(_line(options, error))
        is_well = code is ExitCode.DONE
        print(_line(options, error), file=sys.stdout if is_well else sys.stderr, flush=True)
        sys.exit(code)


def _run_interruptibly(options: argparse.Namespace, started_at: float) -> None:
    try:
        with _interruptible():
            _COMMANDS[options.command](options, started_at)
    except KeyboardInterrupt as interrupt:
        print(f"{_name(options)}: {visible(str(interrupt)) or 'interrupted'}", file=sys.stderr)
        sys.exit(exit_code(interrupt))


def _line(options: argparse.Namespace, error: HybridError) -> str:
    return f"{_name(options)}: {visible(' '.join(str(error).split()))}"


def _name(options: argparse.Namespace) -> str:
    """What speaks in an error message, such as ``hybrid trainer 1``."""
    index = getattr(options, "index", None)
    return f"hybrid {options.command}" + ("" if index is None else f" {index}")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make SIGTERM and the like stop the command as Ctrl-C does, once: the way out is not interrupted."""

    def interrupt(signum: int, frame: object) -> None:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupt(ExitCode.TERMINATED if signum == ASK_SIGNAL else ExitCode.of_signal(signum))

    # What is ignored already, as SIGHUP is under nohup, stays so.
    previous = {
        each: handler
        for each in (*HEARD, ASK_SIGNAL)
        if (handler := signal.getsignal(each)) != signal.SIG_IGN
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
    return load_config(options.config, _overrides(options))


def _overrides(options: argparse.Namespace) -> list[str]:
    """Those of ``--set``, and of the options that stand for one."""
    counts = {name: getattr(options, name, None) for name in ("trainers", "workers")}
    return [*options.set, *(f"cluster.{name}={n}" for name, n in counts.items() if n is not None)]


class _Wanted(NamedTuple):
    """The run that is to be.

    Attributes:
        is_resumed: whether it goes on.
        over: what is to be said where it has come to its end, and nothing is to be done; else empty.
    """

    config: RunConfig
    folder: Place
    is_resumed: bool
    over: str = ""


def _wanted_run(options: argparse.Namespace) -> _Wanted:
    if options.resume not in (None, AUTO):
        if options.config is not None:
            raise ConfigError(
                "--resume", "goes on with the configuration of its run; use --set to change keys"
            )
        run = place(options.resume)
        return _Wanted(resumed_config(run, _overrides(options), options.trust_code), run, True)
    config = _read_config(options)
    newest = newest_run(config) if options.resume else None
    if newest is not None:
        check_same_model(newest, config)
        over = f"{newest} has come to its end; raise train.epochs to go on, or start a run of another name"
        is_done = is_over(newest, config)
        print(visible(over if is_done else f"going on with {newest}"), flush=True)
        return _Wanted(config, newest, True, over if is_done else "")
    folder = run_path(config)
    refuse_existing(folder)
    if options.resume:
        print(visible(f"no run of {config.run.name} yet; starting {folder}"), flush=True)
    return _Wanted(config, folder, False)


@contextmanager
def _going_on_later(folder: Path, command: str) -> Iterator[None]:
    """Have the interrupt of a run in here say what is saved of it, and how it goes on."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        why = f": {interrupt}" if str(interrupt) else ""
        said = f"stopped{why}; {left_behind(folder, command)}"
        raise Interrupt(exit_code(interrupt), said) from interrupt


def _launch(options: argparse.Namespace, started_at: float) -> None:
    from workers.launching.launch import launch

    config, folder, is_resumed, over = _wanted_run(options)
    if over:
        return
    with held_folder(folder, is_resumed) as (here, lock), _going_on_later(here, options.command):
        launch(config, here, TrainTask(here, is_resumed, started_at), lock)


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
    with scratch_logs("hybrid-compare-") as folder, run_lock(folder) as lock:
        if options.script is None:
            launch(config, folder, CompareTask(options.steps), lock)
        else:
            config = config.replace(train=dataclasses.replace(config.train, max_steps=options.steps))
            task = _script_task(options.script, options.arguments)
            _compare_script(config, dataclasses.replace(task, snapshot=folder / "cluster"), folder, lock)


def _compare_script(config: RunConfig, task: ScriptTask, folder: Path, lock: int) -> None:
    """Run a script on a cluster, then in this process, and print what differs."""
    from workers.launching.launch import launch

    print("on a cluster", flush=True)
    launch(config, folder, task, lock)
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
    with scratch_logs("hybrid-run-") as folder, run_lock(folder) as lock:
        launch(config, folder, task, lock)


def _script_task(path: str, arguments: Sequence[str]) -> ScriptTask:
    if not Path(path).is_file():
        raise ConfigError("SCRIPT", "is not a file", path)
    return ScriptTask(path, tuple(arguments))


def _master(options: argparse.Namespace, started_at: float) -> None:
    _end_with_starter()
    config, folder, is_resumed, over = _wanted_run(options)
    secret = _shared_secret(config.cluster)
    if over:  # the others do not know yet
        dismiss(config, secret, over)
        return
    allow_open_files(config.cluster)
    with _imports():
        from workers.roles import master

    if options.script is not None:
        script = _script_task(options.script, ())
        with _coded(master.codes_of(script)):
            master.run(config, script, secret)
        return
    with held_folder(folder, is_resumed) as (here, _), _going_on_later(here, options.command):
        task = TrainTask(here, is_resumed, started_at)
        with _coded(master.codes_of(task)):
            master.run(config, task, secret)


def _by_rank(options: argparse.Namespace, started_at: float) -> None:
    """Be what the rank of this process says, of all that the same command has started."""
    both_given = None not in (options.trainers, options.workers)
    config = RunConfig() if both_given else _wanted_config(options)
    counts = load_config(None, _overrides(options)).cluster if both_given else config.cluster
    role = role_of(os.environ, counts.topology)
    address = Address.parse(_master_of(options))
    options.command, options.script = role.kind.value, None
    if role == MASTER:
        options.set += [f"cluster.master_address={address.host}", f"cluster.master_port={address.port}"]
        _master(options, started_at)
    else:
        options.index, options.master = role.index, str(address)
        options.set = [f"cluster.secret_file={config.cluster.secret_file}", *own_settings(options.set)]
        _role(options, started_at)


def _wanted_config(options: argparse.Namespace) -> RunConfig:
    """The configuration of the run that is to be, as far as it is known without a look at its folder."""
    if options.resume in (None, AUTO):
        return _read_config(options)
    return load_config(place(options.resume) / CONFIG_FILE, _overrides(options))


def _master_of(options: argparse.Namespace) -> str:
    """Where the master is, as it is given, or as torchrun says it; the port is ours all the same."""
    where: str = options.master or master_host(os.environ)
    if not where:
        raise ConfigError("--master", "must be given: HOST or HOST:PORT (torchrun's MASTER_ADDR will do)")
    return where


def _end_with_starter() -> None:
    """Where this process is one of a scheduler's, end with what has started it."""
    if ends_with_starter(os.environ):
        end_with_parent(os.getppid())


@contextmanager
def _coded(code_of: Callable[[BaseException], ExitCode]) -> Iterator[None]:
    """Have an error in here end the process with the right code."""
    try:
        yield
    except HybridError as error:
        raise ToldError(str(error), code_of(error)) from error


def _role(options: argparse.Namespace, started_at: float) -> None:
    _end_with_starter()
    kind = RoleKind(options.command)
    if options.index is None:
        options.index = index_of(os.environ, kind)
    address = Address.parse(_master_of(options))
    if options.index < 0:
        raise ConfigError("--index", "must be at least 0", options.index)
    secret = _shared_secret(with_own(RunConfig(), options.set).cluster)
    with _imports():
        from workers.roles.run import serve

    print(visible(f"waiting for the master at {address}"), flush=True)
    with _coded(exit_code):
        code = serve(Role(kind, options.index), address, secret, options.set)
    sys.exit(code)


def _shared_secret(section: ClusterSection) -> Secret:
    """That which the roles of a cluster have, where they are started by hand."""
    secret = Secret.find(section.secret_file)
    if secret is None:
        rule = f"must be set, or {VARIABLE}, for roles started by hand; hybrid secret FILE makes one"
        raise ConfigError("cluster.secret_file", rule)
    return secret


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
    is_stream = STREAM in options.input
    if is_stream and len(options.input) > 1:
        rule = "names standard input, which cannot be read among files; name it alone, or files"
        raise ConfigError("--input", rule, STREAM)
    with _imports():
        from workers.offline.predictions import predict
        from workers.offline.streamed import predict_stream

    keep = [name for names in options.keep for name in names.split(",")]
    if is_stream:
        predict_stream(options.run_folder, options.output, keep, options.trust_code)
    else:
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
_RUNS = ("launch", "compare", "run", "role", *(kind.value for kind in RoleKind))
_COMMANDS = {
    "launch": _launch,
    "compare": _compare,
    "run": _run,
    RoleKind.MASTER: _master,
    RoleKind.TRAINER: _role,
    RoleKind.WORKER: _role,
    "role": _by_rank,
    "plan": _plan,
    "evaluate": _evaluate,
    "predict": _predict,
    "export": _export,
    "import": _import,
    "config": _config,
    "secret": _secret,
}

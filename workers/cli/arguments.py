"""The arguments of every command, as ``--help`` prints them. Imports nothing slow."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from hybrid import __version__
from hybrid.config.sections import DTYPES
from hybrid.errors import StorageError, most_similar
from hybrid.storage.remote_path import StoragePath, parse_path
from hybrid.topology import RoleKind
from workers.console import Verbosity
from workers.rendezvous.host_setup import DEFAULT_PORT

_Parser: TypeAlias = argparse.ArgumentParser
_Options: TypeAlias = Callable[[_Parser], None]
_COMPARE, _SCRIPT_ARGUMENTS = "compare", "--"
_WITH_SCRIPT = ("run", _COMPARE, "master", "role")  # commands with arguments for a script
COMPARED_DTYPE = DTYPES[-1]
EXPORTS = ("program", "onnx", "tables", "items")
ROW_TYPES = ("float32", "bfloat16")  # of exported tables
AUTO = "auto"  # for --resume
STREAM = "-"  # standard input or output

_EPILOG = (
    "Exit codes: 0 success; 1 failure that would occur again; 2 wrong arguments; 75 failure that a new start "
    "may avoid; 129, 130, 143 stopped by SIGHUP, SIGINT, SIGTERM. docs/failures.md lists the causes."
)
_LAUNCH = (
    "Train a model on a cluster of processes on this machine: a master, trainers and workers. Ctrl-C saves a "
    "checkpoint and stops the run; --resume continues it."
)
_COMPARE_TEXT = (
    "Train some steps on a cluster, train the same steps in one process, and print how much the parameters "
    "and the optimizer state differ."
)
_RUN_TEXT = (
    "Start a cluster on this machine and run a script on every trainer. The script calls hybrid.connect(). "
    "Arguments after -- are for the script."
)
_MASTER = (
    "Start the master of a cluster; trainers and workers connect to it. It needs the secret of the cluster "
    "(HYBRID_SECRET, or --set cluster.secret_file=FILE)."
)
_ROLE = (
    "Start one {} and connect it to the master, which may start later. It needs the secret of the cluster "
    "(HYBRID_SECRET, or --set cluster.secret_file=FILE), and gets everything else from the master."
)
_BY_RANK = (
    "Start the role of this process's rank, which is RANK (torchrun) or SLURM_PROCID (srun). Rank 0 is the "
    "master; the trainers come next, then the workers. Every role needs the secret of the cluster."
)
_PLAN = (
    "Print the placement of tables, the messages and bytes of a step, and the memory of each host. Nothing "
    "is started. The data files are read only if table sizes or the number of ids depend on them."
)
_SECRET = (
    "Write a new secret into a file that only you can read. A cluster accepts only roles that have its "
    "secret. launch creates a secret for each start; roles started by hand must share one."
)
_JSON = "print the result as one JSON object on standard output; all other output goes to standard error"
_CHECKPOINT_OF_RUN = "run folder, for its best checkpoint, or one checkpoint; a path or URL"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return a command's options, and its name as ``command``; exit with code 2 if arguments are invalid."""
    parser, commands = _parsers()
    values = list(sys.argv[1:] if arguments is None else arguments)
    command = next((each for each in values if not each.startswith("-")), None)
    if not values:
        parser.print_help()
        parser.exit(2)
    if command is not None and command not in commands:
        similar = most_similar(command, commands)
        hint = f"did you mean '{similar}'?" if similar else f"choose from {', '.join(commands)}"
        parser.error(f"unknown command '{command}'; {hint}")
    end = len(values)
    if _SCRIPT_ARGUMENTS in values and command in _WITH_SCRIPT:
        end = values.index(_SCRIPT_ARGUMENTS)
    options = parser.parse_args(values[:end], argparse.Namespace(verbosity=Verbosity.NORMAL))
    options.arguments = values[end + 1 :]
    if options.arguments and getattr(options, "script", "") is None:
        parser.error(f"no script is given for the arguments {' '.join(values[end:])}")
    return options


def _path(text: str) -> StoragePath:
    try:
        return parse_path(text)
    except StorageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    levels = common.add_mutually_exclusive_group()
    for flag, level, text in (
        ("verbose", Verbosity.VERBOSE, "print log records too"),
        ("quiet", Verbosity.QUIET, "print only results, warnings and errors"),
    ):
        help_text = f"{text}; before or after COMMAND"
        levels.add_argument(
            f"-{flag[0]}", f"--{flag}", dest="verbosity", action="store_const", const=level, help=help_text
        )
    parser = argparse.ArgumentParser(
        prog="hybrid",
        description="Train recommendation models: dense nets in data parallel on trainers, embedding tables "
        "on workers. Start with 'hybrid launch'; 'hybrid COMMAND --help' describes a command.",
        epilog=_EPILOG,
        parents=[common],
    )
    parser.add_argument("--version", action="version", version=f"hybrid {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, *options: _Options, about: str = "", usage: str = "") -> _Parser:
        command = subparsers.add_parser(
            name,
            help=text,
            description=about or f"{text[0].upper()}{text[1:]}.",
            usage=f"hybrid {name} {usage}" if usage else None,
            parents=[common],
        )
        for add_options in options:
            add_options(command)
        return command

    text = "train a model on a cluster on this machine"
    launch = add("launch", text, _config, _resume, about=_LAUNCH)
    help_text = (
        "train N runs one after the other, with the seeds run.seed, run.seed + 1, and so on, and print mean "
        "and standard deviation of the test metrics; --resume auto continues them"
    )
    launch.add_argument("--seeds", type=int, metavar="N", help=help_text)
    text = "compare a cluster with one process on the same training steps"
    usage = "[OPTION ...] [SCRIPT [-- ARGUMENT ...]]"
    compare = add(_COMPARE, text, _config, _counts, about=_COMPARE_TEXT, usage=usage)
    help_text = "training script, as for 'hybrid run'; without it, the configured run is compared"
    compare.add_argument("script", nargs="?", metavar="SCRIPT", help=help_text)
    compare.add_argument("--steps", type=int, default=20, metavar="N", help="number of steps (default: 20)")
    help_text = f"precision of both sides (default: {COMPARED_DTYPE}; train.dtype for a script)"
    compare.add_argument("--dtype", choices=DTYPES, help=help_text)
    text = "run your training script on a cluster on this machine"
    run = add("run", text, _counts, _config, about=_RUN_TEXT, usage="[OPTION ...] SCRIPT [-- ARGUMENT ...]")
    run.add_argument("program", metavar="SCRIPT", help="Python file that every trainer runs")
    add("master", "start the master of a cluster by hand", _config, _resume, _script, about=_MASTER)
    for kind in (RoleKind.TRAINER, RoleKind.WORKER):
        role = add(kind.value, f"start one {kind} by hand", _master_address, about=_ROLE.format(kind))
        help_text = f"index of the {kind}, from 0 (default: JOB_COMPLETION_INDEX, which Kubernetes sets)"
        role.add_argument("--index", type=int, metavar="N", help=help_text)
        _set(role, "set a key marked 'by host' for this role")
    text = "start the role of this process's rank (torchrun, srun)"
    add("role", text, _master_address, _counts, _config, _resume, _script, about=_BY_RANK)
    text = "print table placement, traffic and memory; starts nothing"
    plan = add("plan", text, _config, about=_PLAN)
    for flag, value_type, metavar, default, help_text in (
        ("--hosts", int, "N", 1, "number of equal hosts (default: 1)"),
        ("--memory", float, "GIB", None, "memory of a host (default: as this machine)"),
        ("--network", float, "GBIT", 10.0, "network of a host in Gbit/s each way (default: 10)"),
        ("--ids", float, "N", None, "mean ids of a sample per sparse column; then no files are read"),
    ):
        plan.add_argument(flag, type=value_type, metavar=metavar, default=default, help=help_text)
    text = "compute metrics of a trained model in one process"
    evaluate = add("evaluate", text, _model, usage="RUN [OPTION ...]")
    _input(evaluate, "files with labels")
    text = "compute predictions for new rows in one process"
    predict = add("predict", text, _model, usage="RUN [OPTION ...]")
    _input(predict, f"files, with or without labels, or {STREAM} for text on standard input")
    help_text = (
        "file to write: Parquet if it ends in .parquet, else CSV; a path or URL; must not exist "
        "(default: CSV on standard output)"
    )
    predict.add_argument("--output", type=_path, default=STREAM, metavar="FILE", help=help_text)
    help_text = "input columns to copy to the output, separated by commas; repeatable"
    predict.add_argument("--keep", action="append", default=[], metavar="NAMES", help=help_text)
    help_text = "write the K items with the highest scores instead of one score (retrieval)"
    predict.add_argument("--top-k", type=int, metavar="K", help=help_text)
    export = add("export", "export a trained model: PyTorch program, ONNX, tables, item vectors", _model)
    help_text = "folder to write, a path or URL; must not exist, unless with --follow"
    export.add_argument("--output", type=_path, required=True, metavar="FOLDER", help=help_text)
    help_text = (
        "program: torch.export; onnx; tables: safetensors; items: vectors of a retrieval task, for an index "
        "(default: program); repeatable"
    )
    export.add_argument("--format", action="append", choices=EXPORTS, help=help_text)
    help_text = "data type of the tables; the loss of precision is measured (default: that of the rows)"
    export.add_argument("--dtype", choices=ROW_TYPES, help=help_text)
    help_text = "export each new model of a run with checkpoint.deltas, until the run ends"
    export.add_argument("--follow", action="store_true", help=help_text)
    text = "write a page with the results, settings and curves of runs side by side"
    report = add("report", text, usage="RUN [RUN ...] [OPTION ...]")
    report.add_argument("run_folders", type=Path, nargs="+", metavar="RUN", help="run folder")
    help_text = "page to write (default: report.html)"
    report.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE", help=help_text)
    config = add("config", "print the effective configuration, all keys, or a schema", _config)
    pages = config.add_mutually_exclusive_group()
    pages.add_argument("--describe", action="store_true", help="print each key: default, rule, meaning")
    pages.add_argument("--schema", action="store_true", help="print a JSON schema, for editors")
    secret = add("secret", "create a secret file for roles started by hand", about=_SECRET)
    secret.add_argument("file", type=Path, metavar="FILE", help="file to create; must not exist")
    for command in (launch, compare, plan, evaluate, predict):
        command.add_argument("--json", action="store_true", help=_JSON)
    return parser, subparsers.choices


def _counts(parser: _Parser) -> None:
    for kind in (RoleKind.TRAINER, RoleKind.WORKER):
        help_text = f"number of {kind}s (cluster.{kind}s)"
        parser.add_argument(f"--{kind}s", type=int, metavar="N", help=help_text)


def _config(parser: _Parser) -> None:
    help_text = "configuration, a TOML file; every key has a default"
    parser.add_argument("--config", type=Path, metavar="FILE", help=help_text)
    _set(parser, "set one key of the configuration")


def _set(parser: _Parser, text: str) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=f"{text}; repeatable"
    )


def _master_address(parser: _Parser) -> None:
    help_text = f"address of the master (default port: {DEFAULT_PORT}; default host: torchrun's MASTER_ADDR)"
    parser.add_argument("--master", metavar="HOST[:PORT]", help=help_text)


def _resume(parser: _Parser) -> None:
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="continue the run in this folder, with its own configuration; 'auto' continues the newest run "
        "of this configuration, or starts one; a finished run is not changed",
    )
    _trust(parser)


def _script(parser: _Parser) -> None:
    help_text = (
        "Python file that every trainer runs, instead of a configured run; arguments after -- are for the "
        "script, and its cluster.resume resumes it"
    )
    parser.add_argument("--script", metavar="FILE", help=help_text)


def _model(parser: _Parser) -> None:
    parser.add_argument("run_folder", type=_path, metavar="RUN", help=_CHECKPOINT_OF_RUN)
    help_text = "FILE.py:FUNCTION that makes the module, if a custom training loop has saved RUN"
    parser.add_argument("--module", metavar="NAME", help=help_text)
    _trust(parser)


def _trust(parser: _Parser) -> None:
    help_text = "use all values of RUN, such as modules, paths and hosts, even if you have not signed them"
    parser.add_argument("--trust-code", action="store_true", help=help_text)


def _input(parser: _Parser, text: str) -> None:
    help_text = f"{text}; paths or URLs, also of folders (default: the test rows of RUN)"
    parser.add_argument("--input", nargs="+", default=[], metavar="FILE", help=help_text)

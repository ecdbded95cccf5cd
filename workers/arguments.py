"""The arguments of every command: what ``--help`` prints. Imports nothing slow."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hybrid import __version__
from hybrid.config.sections import DTYPES
from hybrid.errors import StorageError
from hybrid.storage.remote_path import StoragePath, parse_path
from hybrid.topology import RoleKind
from workers.rendezvous.address import DEFAULT_PORT

_RUN, _COMPARE, _OF_SCRIPT = "run", "compare", "--"
_RUN_USAGE = (
    "hybrid run [-h] [--trainers N] [--workers N] [--config FILE] [--set SECTION.KEY=VALUE] SCRIPT [-- ...]"
)
COMPARED_DTYPE = DTYPES[-1]
EXPORTS = ("program", "onnx", "tables")
ROW_TYPES = ("float32", "bfloat16")  # of exported tables
AUTO = "auto"  # for --resume
STREAM = "-"  # in the place of a file
_ENDS = (
    "Exit codes: 0 done; 1 another start would fail the same way; 2 usage; 75 another start may help; "
    "129, 130, 143 asked to stop by SIGHUP, SIGINT, SIGTERM. docs/failures.md has what leads to which."
)
_BY_RANK = (
    "Start the role that the rank of this process says: RANK and WORLD_SIZE, or SLURM_PROCID of srun. Rank 0 "
    "is the master, then come the trainers, then the workers. The secret is as for every role."
)
_SERVING = (RoleKind.TRAINER, RoleKind.WORKER)
_ROLE = (
    "Start one role; the master may come later. It needs the cluster's secret (HYBRID_SECRET, or --set "
    "cluster.secret_file=FILE), and has everything else from the master."
)
_PLAN = (
    "Print where tables would lie, what each link carries, memory, samples a second, and what limits them. "
    "Roles, cluster.trainers and cluster.workers, are dealt to hosts in turn. Starts nothing. Data is read "
    "where rows or ids depend on it: not for hashed columns of one id a sample, nor the built-in click log."
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of one command, its name in ``command``; exits with 2 where they are wrong."""
    parser = _parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    # What a script of the user's is to get is no option of ours.
    end = given.index(_OF_SCRIPT) if _OF_SCRIPT in given and given[0] in (_RUN, _COMPARE) else len(given)
    options = parser.parse_args(given[:end])
    options.arguments = given[end + 1 :]
    if getattr(options, "run_folder", options) is None:
        # An option of many values takes all that follow it, RUN too.
        if len(options.input) < 2:
            parser.error(f"{options.command}: RUN is missing")
        options.run_folder = _place(options.input.pop())
    return options


def _place(text: str) -> StoragePath:
    try:
        return parse_path(text)
    except StorageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hybrid",
        description="Hybrid-parallel training: data-parallel dense nets, embedding tables on remote workers.",
        epilog=_ENDS,
    )
    parser.add_argument("--version", action="version", version=f"hybrid {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    launch = commands.add_parser("launch", help="run a whole cluster on this machine")
    _add_config(launch)
    _add_resume(launch)
    compare = commands.add_parser(
        _COMPARE, help="train some steps on a cluster and in one process, and print what differs"
    )
    _add_config(compare)
    compare.add_argument(
        "script",
        nargs="?",
        metavar="SCRIPT",
        help="a script of your own, as hybrid run has it; else a configured run",
    )
    _add_counts(compare)
    compare.add_argument("--steps", type=int, default=20, help="how many steps (default: 20)")
    compare.add_argument(
        "--dtype",
        choices=DTYPES,
        help=f"precision of both (default: {COMPARED_DTYPE}; of a script's tables: train.dtype)",
    )
    own = commands.add_parser(
        _RUN, usage=_RUN_USAGE, help="start a cluster, and run your own script on its trainers"
    )
    own.add_argument(
        "program",
        metavar="SCRIPT",
        help="a Python file that every trainer runs, and that calls hybrid.connect(); or MODULE:FUNCTION, "
        "called on the master as function(topology, config)",
    )
    _add_counts(own)
    _add_config(own)
    for kind, text in (
        (RoleKind.MASTER, "start the master by hand; it waits for the other roles"),
        (RoleKind.TRAINER, "start one trainer by hand"),
        (RoleKind.WORKER, "start one worker by hand"),
    ):
        role = commands.add_parser(kind.value, help=text, description=_ROLE if kind in _SERVING else None)
        if kind is RoleKind.MASTER:
            _add_config(role)
            help_text = "a Python file that trainers run in the place of a training run"
            role.add_argument("--script", metavar="FILE", help=help_text)
            _add_resume(role)
        else:
            _add_place(role, kind)
    ranked = commands.add_parser(
        "role", help="start one role of a job that numbers its processes", description=_BY_RANK
    )
    _add_master(ranked)
    _add_counts(ranked)
    _add_config(ranked)
    _add_resume(ranked)
    text = "print which worker would hold which rows, and the speed to expect; starts nothing"
    plan = commands.add_parser("plan", help=text, description=_PLAN)
    _add_config(plan)
    _add_plan_options(plan)
    evaluate = commands.add_parser(
        "evaluate",
        help="metrics of a trained model, in one process",
        usage="hybrid evaluate [-h] [--trust-code] [--input FILE [FILE ...]] RUN",
    )
    _add_run(evaluate)
    _add_input(evaluate, "labelled files")
    predict = commands.add_parser(
        "predict",
        help="predictions for new rows, in one process",
        usage="hybrid predict [-h] [--trust-code] [--keep NAMES] [--output FILE] "
        "[--input FILE [FILE ...]] RUN",
    )
    _add_run(predict)
    _add_input(predict, f"files, with labels or without, or {STREAM} for text on standard input")
    help_text = (
        "CSV to write, or Parquet where it ends in .parquet; path or URL; must not exist "
        f"(default: {STREAM}, CSV on standard output)"
    )
    predict.add_argument("--output", type=_place, default=STREAM, metavar="FILE", help=help_text)
    help_text = "columns of the input to write beside the predictions, with commas between; may be repeated"
    predict.add_argument("--keep", action="append", default=[], metavar="NAMES", help=help_text)
    _add_export(
        commands.add_parser("export", help="a trained model as files for others: PyTorch, ONNX, tables")
    )
    _add_import(
        commands.add_parser("import", help="tables of another program, in a copy of a run to train on from")
    )
    config = commands.add_parser("config", help="print the effective configuration, or every key there is")
    _add_config(config)
    config.add_argument("--describe", action="store_true", help="print every key: default, rule and meaning")
    secret = commands.add_parser(
        "secret",
        help="make the secret that roles started by hand share",
        description="Make a file with a new secret, which only you can read. Roles started by hand let "
        "nobody into their cluster who does not have the same one; launch makes its own for each start.",
    )
    secret.add_argument("file", type=Path, metavar="FILE", help="to write; must not exist")
    return parser


def _add_export(parser: argparse.ArgumentParser) -> None:
    help_text = "run folder, of whose checkpoints the best is taken; or one of these"
    parser.add_argument("run_folder", type=_place, metavar="RUN", help=help_text)
    _add_output(parser)
    parser.add_argument(
        "--format",
        action="append",
        choices=EXPORTS,
        help="program: of torch.export; onnx; tables: safetensors (default: program); may be repeated",
    )
    parser.add_argument(
        "--dtype",
        choices=ROW_TYPES,
        help="data type of the tables; the loss of precision is measured (default: that of the run)",
    )
    _add_map(parser, "what tables are called in the file of tables")
    _add_trust(parser)


def _add_import(parser: argparse.ArgumentParser) -> None:
    help_text = "state dict that torch.save has written, or safetensors"
    parser.add_argument("source", type=_place, metavar="SOURCE", help=help_text)
    help_text = "run folder, of whose checkpoints the newest is taken; or one of these; it stays as it is"
    parser.add_argument("--into", type=_place, required=True, metavar="RUN", help=help_text)
    _add_output(parser)
    _add_map(parser, "which tensor is which table", required=True)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=_place,
        required=True,
        metavar="FOLDER",
        help="to write, a path or URL; must not exist",
    )


def _add_map(parser: argparse.ArgumentParser, text: str, required: bool = False) -> None:
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        required=required,
        metavar="NAME=TABLE",
        help=f"{text}; * stands for the same on both sides: 'embedding_bags.*.weight=*'; may be repeated",
    )


def _add_counts(parser: argparse.ArgumentParser) -> None:
    for kind in (RoleKind.TRAINER, RoleKind.WORKER):
        help_text = f"how many {kind}s: cluster.{kind}s"
        parser.add_argument(f"--{kind}s", type=int, metavar="N", help=help_text)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; without it, all defaults")
    _add_set(parser, "override one key")


def _add_place(role: argparse.ArgumentParser, kind: RoleKind) -> None:
    help_text = f"which {kind}, from 0 (default: JOB_COMPLETION_INDEX, as Kubernetes sets it)"
    role.add_argument("--index", type=int, metavar="N", help=help_text)
    _add_master(role)
    _add_set(role, "give this role a value of its own for a key that may differ between hosts")


def _add_master(role: argparse.ArgumentParser) -> None:
    help_text = (
        f"where the master is: name or address of its host, and port (default: {DEFAULT_PORT}; under "
        "torchrun, the host is MASTER_ADDR)"
    )
    role.add_argument("--master", metavar="HOST[:PORT]", help=help_text)


def _add_set(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=f"{text}; may be repeated"
    )


def _add_plan_options(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--hosts", type=int, default=1, metavar="N", help="how many, all alike (default: 1)")
    own = "(default: those of this machine)"
    plan.add_argument("--cores", type=int, metavar="N", help=f"of a host {own}")
    plan.add_argument("--memory", type=float, metavar="GIB", help="of a host (default: that of this machine)")
    plan.add_argument(
        "--network",
        type=float,
        default=10.0,
        metavar="GBIT",
        help="a second of a host, each way (default: 10)",
    )
    plan.add_argument(
        "--ids",
        type=float,
        metavar="N",
        help="mean ids of a sample in each sparse column; no files are read then (data.vocabulary = hash)",
    )
    plan.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="what scripts/bench scaling has measured (default: costs that are in the package)",
    )


def _add_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="run folder to go on in, with its own config; auto: the newest run of this config's name, or "
        "run.folder; a new one where there is none, and nothing at all where it has come to its end",
    )
    _add_trust(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    # Not there where --input has taken it; see parse.
    help_text = "run folder, of whose checkpoints the best is taken; or one of these"
    parser.add_argument("run_folder", type=_place, nargs="?", metavar="RUN", help=help_text)
    _add_trust(parser)


def _add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="run the code that RUN names (nets, losses, metrics), though it is not a run of your own",
    )


def _add_input(parser: argparse.ArgumentParser, kind: str) -> None:
    help_text = f"{kind}; paths or URLs, of folders too; default: the test rows of RUN"
    parser.add_argument("--input", nargs="+", default=[], metavar="FILE", help=help_text)

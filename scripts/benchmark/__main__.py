"""The command line of ``scripts/bench``."""

import argparse
import signal
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console

from benchmark import compare, links, prepare
from benchmark.systems import ON_CPU, ON_GPU
from benchmark.workloads import WORKLOADS
from hybrid.errors import HybridError

FAILED = 1
INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0, 1 (a system failed, or a loss is wrong), 2 (usage) or 130 (interrupted)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given.insert(0, "compare")
    options = _parser().parse_args(given)
    for each in _SIGNALS:
        signal.signal(each, _interrupt)
    try:
        return int(options.run(options, Console(width=None if sys.stdout.isatty() else 160)))
    except HybridError as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("scripts/bench: interrupted; every process has stopped", file=sys.stderr)
        return INTERRUPTED


def _interrupt(signum: int, frame: object) -> None:
    """Interrupt once; the cleanup is not interrupted."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--output", type=Path, metavar="FOLDER", help="folder for results (default: a new one under runs/)"
    )
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description="Measures this project and other systems."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    compared = argparse.ArgumentParser(add_help=False, parents=[shared])
    steps = ", ".join(f"{count} of {name}" for name, count in compare.TIMED_STEPS.items())
    compared.add_argument("--quick", action="store_true", help="one short round, within six minutes")
    compared.add_argument("--steps", type=int, metavar="N", help=f"timed steps (default: {steps})")
    text = f"rounds through all systems (default: {compare.ROUNDS})"
    compared.add_argument("--rounds", type=int, metavar="N", help=text)
    compared.set_defaults(run=compare.run)

    text = "all systems on the same workloads; the default command"
    command = commands.add_parser("compare", help=text, description=text, parents=[compared])
    _add_names(command, "--workloads", [name for name in WORKLOADS if name != "W7"])
    _add_names(command, "--systems", ON_CPU)

    text = "trainers on one GPU, and on the CPUs of the same machine"
    command = commands.add_parser("gpu", help=text, description=text, parents=[compared])
    _add_names(command, "--workloads", ["W1", "W2", "W3", "W7"])
    _add_names(command, "--systems", ["one-process", "ours-sync", "ours-lookahead", *ON_GPU])

    text = "two hosts with a slow link between them, as root, within ten minutes"
    command = commands.add_parser("links", help=text, description=text, parents=[shared])
    command.set_defaults(run=links.run)
    _add_names(command, "--links", links.LINKS)
    _add_names(command, "--modes", ("sync", "lookahead", "async"))
    text = "duration of each measurement (default: 4)"
    command.add_argument("--seconds", type=int, default=4, metavar="N", help=text)

    text = "CPU time and memory of preparing data, compared with pyarrow"
    command = commands.add_parser("prepare", help=text, description=text, parents=[shared])
    command.set_defaults(run=prepare.run)
    rows = [1_000_000, 5_000_000, 20_000_000]
    text = f"numbers of rows (default: {' '.join(map(str, rows))})"
    command.add_argument("--rows", type=int, nargs="+", default=rows, metavar="N", help=text)
    return parser


def _add_names(command: argparse.ArgumentParser, option: str, names: Collection[str]) -> None:
    """Add an option that selects some of the names; the default is all."""
    text = f"some of {', '.join(names)} (default: all)"
    command.add_argument(option, nargs="+", choices=names, default=list(names), metavar="NAME", help=text)


if __name__ == "__main__":
    sys.exit(main())

"""The command line of ``scripts/bench``. Does not import torch before the arguments are checked."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console

from benchmark.durations import LINKS, PRODUCTS, ROUNDS, TIMED_STEPS, USUAL_PRODUCTS
from benchmark.systems import SYSTEMS
from hybrid.errors import HybridError

FAILED = 1
INTERRUPTED = 130
_MODULES = {"start": "start_stop", "prepare": "preparing"}  # of commands that have another name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0, 1 (a system failed, or a loss is wrong), 2 (usage) or 130 (interrupted)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0].startswith("-") and given[0] not in ("-h", "--help")):
        given.insert(0, "compare")
    options = _parser().parse_args(given)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) != signal.SIG_IGN:
            signal.signal(each, _interrupt)
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        return int(options.run(options, console))
    except HybridError as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("scripts/bench: interrupted; every process has stopped", file=sys.stderr)
        return INTERRUPTED


def _interrupt(signum: int, frame: object) -> None:
    """Interrupt once; the cleanup is not interrupted."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measures this project and other systems.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    compare = _add(commands, "compare", "all systems on the same workloads (default)")
    _add_compare_options(compare)
    parser.epilog = f"options of compare:{compare.format_help().partition('options:')[2]}"
    surface = _add(commands, "surface", "a grid of shapes beside one process and TorchRec, within an hour")
    surface.add_argument("--quick", action="store_true", help="six points, within ten minutes")
    _add_count(surface, "--seconds", 3, "approximate time of each measurement")
    links = _add(commands, "links", "hosts with a slow link between them, as root, within ten minutes")
    _add_names(links, "--links", "link", LINKS, "some")
    modes = "sync,lookahead,async"
    links.add_argument("--modes", default=modes, metavar="NAMES", help=f"of train.update (default: {modes})")
    _add_count(links, "--seconds", 4, "time of each measurement")
    start = _add(commands, "start", "duration of the start and the end of a job")
    _add_count(start, "--rounds", 5, "launches of the default job")
    prepare = _add(commands, "prepare", "CPU, memory and bytes of preparing data, compared with pyarrow")
    text = "numbers of rows, one after the other (default: 1000000 5000000 20000000)"
    rows = [1_000_000, 5_000_000, 20_000_000]
    prepare.add_argument("--rows", type=_count, nargs="+", default=rows, metavar="N", help=text)
    _add_count(prepare, "--rounds", 1, "rounds through all systems")
    text = "cores for each system (default: all)"
    prepare.add_argument("--cores", type=_count, default=0, metavar="N", help=text)
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=_later(_MODULES.get(name, name)))
    command.add_argument(
        "--output", type=Path, metavar="FOLDER", help="folder for results (default: a new one under runs/)"
    )
    return command


def _add_compare_options(compare: argparse.ArgumentParser) -> None:
    _add_names(compare, "--workloads", "workload", TIMED_STEPS, "some")
    _add_names(compare, "--systems", "system", SYSTEMS, "some")
    text = "the matrix products of dense nets, by a library or in bfloat16, some"
    _add_names(compare, "--products", "products", PRODUCTS, text, USUAL_PRODUCTS)
    steps = ", ".join(f"{count} of {name}" for name, count in TIMED_STEPS.items())
    compare.add_argument("--quick", action="store_true", help="one short round, within six minutes")
    compare.add_argument("--steps", type=_count, metavar="N", help=f"timed steps (default: {steps})")
    text = f"rounds through all systems (default: {ROUNDS})"
    compare.add_argument("--rounds", type=_count, metavar="N", help=text)


def _add_count(parser: argparse.ArgumentParser, name: str, default: int, text: str) -> None:
    parser.add_argument(name, type=_count, default=default, metavar="N", help=f"{text} (default: {default})")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1: {text!r}")
    return int(text)


def _add_names(
    command: argparse.ArgumentParser,
    option: str,
    what: str,
    known: Collection[str],
    text: str,
    usual: Collection[str] = (),
) -> None:
    """Add an option for some of the known names; the default is ``usual``, or all."""
    command.add_argument(
        option,
        type=_names(what, known),
        default=list(usual or known),
        metavar="NAMES",
        help=f"{text} of {','.join(known)} (default: {','.join(usual) or 'all'})",
    )


def _names(kind: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated names, which must be known."""

    def read(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"no {kind} {name!r}; there are {', '.join(known)}")
        return names

    return read


def _later(module: str) -> Callable[[argparse.Namespace, Console], int]:
    """Return the command of a module that is imported when it is called, because it imports torch."""

    def run(options: argparse.Namespace, console: Console) -> int:
        return int(import_module(f"benchmark.{module}").run(options, console))

    return run


if __name__ == "__main__":
    sys.exit(main())

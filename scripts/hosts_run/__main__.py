"""The command line of ``scripts/hosts``."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from support.first_process import hosts_refused

from hosts_run.links import LINKS, Rate, measure, table
from hybrid.errors import HybridError

FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0, 1 (a run failed, or there can be no hosts) or 2 (usage)."""
    options = _parser().parse_args(arguments)
    if reason := hosts_refused():
        print(f"scripts/hosts: {reason}", file=sys.stderr)
        return FAILED
    with TemporaryDirectory(prefix="hybrid-hosts-") as folder:
        try:
            print(table(_shown(options, Path(folder)), options.links))
        except HybridError as error:
            print(f"scripts/hosts: {error}", file=sys.stderr)
            return FAILED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/hosts", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    links = commands.add_parser(
        "links", help="samples a second over links that are long or narrow, as a table of Markdown"
    )
    links.add_argument("--seconds", type=float, default=4.0, help="that each run is measured (default: 4)")
    links.add_argument(
        "--links",
        nargs="+",
        choices=LINKS,
        default=list(LINKS),
        metavar="LINK",
        help=f"of {', '.join(LINKS)}",
    )
    return parser


def _shown(options: argparse.Namespace, folder: Path) -> list[Rate]:
    """All that is measured, each said as soon as it is known."""
    rates, start = [], time.monotonic()
    for rate in measure(folder, options.links, options.seconds):
        rates.append(rate)
        said = f"{rate.shape}, {rate.link}, {rate.update}, {rate.wire_dtype}: {rate.samples_per_second:,.0f}"
        print(f"{time.monotonic() - start:5.0f} s  {said}", file=sys.stderr, flush=True)
    return rates


if __name__ == "__main__":
    sys.exit(main())

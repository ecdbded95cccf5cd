"""The command line of ``scripts/chaos``."""

from __future__ import annotations

import argparse
import random
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from chaos_run.report import save, show, show_usage
from chaos_run.run_comparison import differences
from chaos_run.running import Kill, Plan, Run
from hybrid.errors import HybridError
from workers.run_folder.run_access import read_restarts

if TYPE_CHECKING:  # imports torch
    from chaos_run.on_hosts import HostsRun

FAILED = 1
INTERRUPTED = 130
_EARLY = 0.25
_JOB = (
    "data.synthetic_rows=40000",
    "train.batch_size=128",
    "train.epochs=2",
    "train.eval_every_steps=100",
    "train.log_every_steps=1",
    "checkpoint.every_steps=20",
    "dense.device=cpu",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 0, 1 (a run failed or has another result), 2 (usage) or 130 (interrupted)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.script and options.hosts:
        parser.error("--script takes no --hosts")
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.default_int_handler)
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        return _run(options, console)
    except HybridError as error:
        print(f"scripts/chaos: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("scripts/chaos: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        description="Trains twice, once uninterrupted and once while roles are killed at random moments, and "
        "compares the results bit for bit. Trains again if a run ends before all kills are done.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file (default: a small job)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as for launch"
    )
    parser.add_argument(
        "--kills", type=int, default=10, help="how many (default: 10); 0 only measures memory"
    )
    parser.add_argument(
        "--freeze",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="fraction of the roles that are frozen instead (default: 0)",
    )
    parser.add_argument(
        "--hosts",
        type=int,
        default=0,
        metavar="N",
        help="run the roles on N hosts, which are network namespaces, and kill hosts; --freeze is the "
        "fraction that is unplugged first; needs root",
    )
    parser.add_argument(
        "--script",
        nargs="?",
        const="script",
        choices=("script", "keys"),
        default="",
        help="train a custom loop by hybrid run, not a configured run; keys: a table that grows to its limit",
    )
    parser.add_argument("--launcher", action="store_true", help="kill the launcher too, and start it again")
    parser.add_argument("--pause", type=float, default=3.0, help="maximum seconds before a kill (default: 3)")
    parser.add_argument("--seed", type=int, default=None, help="seed of the random choices; printed")
    parser.add_argument(
        "--folder", type=Path, default=None, help="output folder (default: a new one under runs/)"
    )
    return parser


def _run(options: argparse.Namespace, console: Console) -> int:
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    folder = (options.folder or Path("runs") / f"chaos-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    folder.mkdir(parents=True)
    console.print(f"seed {seed}, in {folder}", highlight=False, soft_wrap=True)
    arguments = _launch_arguments(options)
    with Run(folder / "uninterrupted", arguments, options.script) as uninterrupted:
        uninterrupted.await_end()
    show_usage(console, uninterrupted.usage)
    plan = Plan(options.freeze, options.launcher, _EARLY, options.pause)
    chance = random.Random(seed)
    kills: list[Kill] = []
    runs: dict[str, list[str]] = {}
    restarts = 0
    disturbed_run = _run_class(options)
    while len(kills) < options.kills:
        with disturbed_run(folder / f"killed-{len(runs) + 1}", arguments) as killed:
            kills += killed.disturb(options.kills - len(kills), plan, chance)
            killed.await_end()
        runs[killed.folder.name] = differences(uninterrupted.folder, killed.folder)
        restarts += len(read_restarts(killed.folder))
    show(console, kills)
    save(folder / "chaos.json", seed, kills, restarts, runs)
    return _report_result(console, len(kills), restarts, runs)


def _run_class(options: argparse.Namespace) -> Callable[[Path, Sequence[str]], Run | HostsRun]:
    """Return the class of the runs that are disturbed."""
    if not options.hosts:
        return partial(Run, script=options.script)
    from support.namespaces import hosts_refused

    from chaos_run.on_hosts import HostsRun

    if reason := hosts_refused():
        raise HybridError(reason)
    return partial(HostsRun, num_hosts=options.hosts)


def _launch_arguments(options: argparse.Namespace) -> list[str]:
    job = () if options.config else _JOB
    config = ["--config", str(options.config)] if options.config else []
    # Every kill may need a restart.
    overrides = (*job, *options.set, f"cluster.max_restarts={options.kills}")
    return [*config, *(text for override in overrides for text in ("--set", override))]


def _report_result(console: Console, kills: int, restarts: int, runs: dict[str, list[str]]) -> int:
    restarted = f", {restarts} restarts" if restarts else ""  # not recorded for scripts
    console.print(f"{kills} kills{restarted} in {len(runs)} run(s)", highlight=False)
    for name, differing in runs.items():
        result = f"DIFFERENT: {', '.join(differing)}" if differing else "the same result, bit for bit"
        console.print(f"{name}: {result}", highlight=False, soft_wrap=True)
    return FAILED if any(runs.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Results of the kills, as tables and as JSON."""

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from chaos_run.running import Kill, Usage
from chaos_run.victims import PHASES


def show(console: Console, kills: Sequence[Kill]) -> None:
    """Print the number of kills by role and phase, and the time until the next step."""
    counts = Counter((kill.role, kill.phase) for kill in kills)
    table = Table(title="kills", title_justify="left")
    for heading in ("role", *PHASES, "all", "frozen"):
        table.add_column(heading, justify="left" if heading == "role" else "right")
    for role in sorted({kill.role for kill in kills}):
        of_role = [kill for kill in kills if kill.role == role]
        frozen = sum(kill.signal == "SIGSTOP" for kill in of_role)
        cells = [counts[role, phase] for phase in PHASES]
        table.add_row(role, *map(str, [*cells, len(of_role), frozen]))
    console.print(table)
    for number, name in (("SIGKILL", "killed"), ("SIGSTOP", "frozen"), ("unplugged", "unplugged")):
        seconds = [k.seconds for k in kills if k.signal == number and k.seconds is not None]
        if seconds:
            console.print(
                f"{name}: recovered after {statistics.median(seconds):.1f} s (median of {len(seconds)}), "
                f"at most {max(seconds):.1f} s",
                highlight=False,
            )


def show_usage(console: Console, usage: Mapping[str, Sequence[Usage]]) -> None:
    """Print the largest values of each role in each quarter of the uninterrupted run."""
    for name, of_role in usage.items():
        quarters = [of_role[len(of_role) * i // 4 : len(of_role) * (i + 1) // 4] for i in range(4)]
        largest = [Usage(*map(max, zip(*quarter, strict=True))) for quarter in quarters if quarter]
        for quantity, values in zip(Usage._fields, zip(*largest, strict=True), strict=True):
            console.print(f"{name}: {quantity} {', '.join(map(str, values))} by quarter", highlight=False)


def save(path: Path, seed: int, kills: Sequence[Kill], restarts: int, runs: dict[str, list[str]]) -> None:
    """Write the seed, the kills and their results to a JSON file.

    Args:
        restarts: number of restarts by the launchers.
        runs: differences by folder of the disturbed runs.
    """
    report = {
        "seed": seed,
        "restarts": restarts,
        "differences": runs,
        "kills": [dataclasses.asdict(kill) for kill in kills],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")

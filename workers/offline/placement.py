"""Printing where the tables of a run would lie."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hybrid.config import RunConfig
from hybrid.data.prepared import prepare
from hybrid.data.storage import PreparedDataset
from hybrid.embedding.placement import Placement, bytes_per_row, bytes_per_sample
from hybrid.training.tables import place_tables
from workers.screen.terminal import passing_status


def print_plan(config: RunConfig, cache: Path) -> None:
    """Print the shards of every table, and what each worker holds and moves."""
    with passing_status() as say:
        folder = prepare(config, cache, say)
    dataset = PreparedDataset.open(folder, "train")
    ids_per_sample = dataset.ids_per_sample
    tables, placement = place_tables(config, dataset.input_spec, ids_per_sample)
    console = Console()
    shards = _table("table", "rows", "dim", "pooling", "optimizer", "MiB", "placement")
    for table in tables:
        parts = placement.of_table(table.name)
        workers = ", ".join(str(part.worker) for part in parts)
        shards.add_row(
            table.name,
            f"{table.num_rows:,}",
            str(table.dim),
            table.pooling,
            table.optimizer.name,
            _mib(table.num_rows * bytes_per_row(table)),
            f"worker {workers}" if len(parts) == 1 else f"workers {workers}",
        )
    # In whole lines, which a terminal breaks where it must.
    for each in (shards, "", _workers(config, placement, ids_per_sample)):
        console.print(each, soft_wrap=True, highlight=False)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in headings:
        is_number = heading in ("rows", "dim", "tables") or heading.startswith("MiB")
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=True)
    return table


def _workers(config: RunConfig, placement: Placement, ids_per_sample: Mapping[str, float]) -> Table:
    workers = _table("worker", "tables", "rows", "MiB", "MiB moved a step at most")
    for worker in range(placement.num_workers):
        held = placement.of_worker(worker)
        moved = (
            sum(bytes_per_sample(s.table, ids_per_sample) / s.count for s in held) * config.train.batch_size
        )
        workers.add_row(
            str(worker),
            str(len(held)),
            f"{sum(s.num_rows for s in held):,}",
            _mib(sum(s.num_bytes for s in held)),
            _mib(moved),
        )
    return workers


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.2f}"

"""Printing where the tables of a run would lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hybrid.config import RunConfig
from hybrid.data.prepared import prepare
from hybrid.data.storage import PreparedDataset
from hybrid.embedding.placement import Placement, bytes_per_row, bytes_per_sample
from hybrid.embedding.tables import plan_tables
from workers.reporting.terminal import passing_status


def print_plan(config: RunConfig, cache: Path) -> None:
    """Print the shards of every table, and what each worker holds and moves."""
    with passing_status() as say:
        folder = prepare(config, cache, say)
    dataset = PreparedDataset.open(folder, "train")
    ids_per_sample = dataset.ids_per_sample
    tables, placement = plan_tables(config, dataset.input_spec, ids_per_sample)
    console = Console()
    shards = Table("table", "rows", "dim", "pooling", "optimizer", "placement", "size", title="tables")
    for table in tables:
        parts = placement.of_table(table.name)
        kind = "table-wise" if len(parts) == 1 else "row-wise"
        where = f"{kind}: worker {', '.join(str(p.worker) for p in parts)}"
        size = _mib(table.num_rows * bytes_per_row(table))
        shards.add_row(
            table.name,
            f"{table.num_rows:,}",
            str(table.dim),
            table.pooling,
            table.optimizer.name,
            where,
            size,
        )
    console.print(shards)
    console.print(_workers(config, placement, ids_per_sample))


def _workers(config: RunConfig, placement: Placement, ids_per_sample: Mapping[str, float]) -> Table:
    workers = Table("worker", "tables", "rows", "memory", "at most moved a step", title="workers")
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
    return f"{num_bytes / 2**20:,.2f} MiB"

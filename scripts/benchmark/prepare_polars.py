"""Rows of ``click_rows`` read and encoded by polars alone: FILE, and a folder that it leaves alone."""

import os
import sys

# What it may use; read when it is imported.
os.environ["POLARS_MAX_THREADS"] = str(len(os.sched_getaffinity(0)))

import polars as pl

from benchmark.click_rows import COLUMNS, DENSE, SPARSE


def main(path: str, result: str) -> None:
    """Read, one dictionary for each column of values, 0 for each missing number."""
    types = dict.fromkeys(COLUMNS, pl.Int8)
    types |= dict.fromkeys(DENSE, pl.Float64)
    types |= dict.fromkeys(SPARSE, pl.Categorical)
    table = pl.read_csv(path, has_header=False, separator="\t", quote_char=None, schema=types)
    table.with_columns(pl.col(DENSE).fill_null(0.0))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Read and encode rows of ``click_rows`` with pyarrow only; arguments: FILE and an unused folder."""

import os
import sys

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from benchmark.click_rows import COLUMNS, DENSE, SPARSE

_BLOCK_BYTES = 16 << 20


def main(path: str, result: str) -> None:
    """Read in blocks, with one dictionary per categorical column, and 0 for missing numbers."""
    pa.set_cpu_count(len(os.sched_getaffinity(0)))
    types = dict.fromkeys(COLUMNS, pa.int8())
    types |= dict.fromkeys(DENSE, pa.float64())
    types |= dict.fromkeys(SPARSE, pa.dictionary(pa.int32(), pa.string()))
    table = pacsv.read_csv(
        path,
        pacsv.ReadOptions(column_names=COLUMNS, block_size=_BLOCK_BYTES),
        pacsv.ParseOptions(delimiter="\t", quote_char=False),
        pacsv.ConvertOptions(column_types=types, strings_can_be_null=True),
    )
    table = table.unify_dictionaries()
    for name in DENSE:
        table = table.set_column(COLUMNS.index(name), name, pc.fill_null(table[name], 0.0))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What ``scripts/hosts links`` measures, and how it shows it."""

from pathlib import Path

import pytest
from hosts_run.links import SHAPES, UPDATES, WIRE_DTYPES, Rate, measure, table
from support.namespaces import needs_hosts


def test_the_table_has_a_line_for_each_job_and_a_column_for_each_link() -> None:
    rates = [Rate(SHAPES[0], "b", "async", "rows", 12345.6), Rate(SHAPES[1], "a", "sync", "bfloat16", 7.0)]
    heading, rule, *lines = table(rates, ["a", "b"]).splitlines()
    assert heading.endswith("| a | b |")
    assert rule == "|---|---|---|---:|---:|"
    assert len(lines) == len(SHAPES) * len(UPDATES) * len(WIRE_DTYPES)
    assert f"| {SHAPES[0]} | async | rows |  | 12,346 |" in lines
    assert f"| {SHAPES[1]} | sync | bfloat16 | 7 |  |" in lines


@pytest.mark.long
@pytest.mark.timeout(600)
@needs_hosts
def test_a_long_link_is_slower_where_steps_wait_for_it(tmp_path: Path) -> None:
    found = {}
    for rate in measure(tmp_path, ["as quick as the machine", "20 ms"], seconds=1.0):
        found[rate.link, rate.update, rate.shape, rate.wire_dtype] = rate.samples_per_second
    small, rows = SHAPES[0], WIRE_DTYPES[0]
    at_once, late = (found[link, "sync", small, rows] for link in ("as quick as the machine", "20 ms"))
    assert late < small.batch_size / (2 * 20e-3), "there and back at least once a step"
    assert late < at_once / 2
    assert late < found["20 ms", "pipelined", small, rows], "which waits for less"
    assert len(found) == 2 * len(SHAPES) * len(UPDATES) * len(WIRE_DTYPES)

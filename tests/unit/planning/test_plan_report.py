"""The output of ``hybrid plan``."""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from hybrid.config import (
    ClusterSection,
    DataSection,
    DenseSection,
    EmbeddingSection,
    RunConfig,
    TableSection,
    TrainSection,
)
from workers.planning.plan_report import print_plan
from workers.planning.step_model import Hosts

HOST = Hosts(1, 4, 2.0**34, 1e9)
Planned: TypeAlias = Callable[..., str]


@pytest.fixture
def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Planned:
    """Print the plan of the synthetic click log."""

    def plan(trainers: int = 2, workers: int = 2, hosts: Hosts = HOST, **sections: object) -> str:
        cluster = ClusterSection(trainers=trainers, workers=workers)
        config = RunConfig(cluster=cluster, train=TrainSection(update="pipelined")).replace(**sections)
        print_plan(config, tmp_path, hosts, None)
        assert not list(tmp_path.iterdir()), "no data is made"
        return capsys.readouterr().out

    return plan


def test_every_table_and_every_worker(planned: Planned) -> None:
    of_tables, of_workers, *_ = planned().split("\n\n")
    assert len(re.findall(r"(?m)^C\d+ .* worker [01]", of_tables)) == 26
    by_worker = [line.split() for line in of_workers.splitlines()[1:]]
    assert [cells[0] for cells in by_worker] == ["0", "1"]
    assert sum(int(cells[1]) for cells in by_worker) == 26
    assert sum(int(cells[2].replace(",", "")) for cells in by_worker) > 150_000


def test_optimizers_that_step_all_rows(planned: Planned) -> None:
    embedding = EmbeddingSection(optimizer="adam(weight_decay = 0.1)")
    all_rows = "adam(weight_decay = 0.1, all_rows = true)"
    of_tables = planned(
        embedding=embedding,
        tables={"C3": TableSection(optimizer=all_rows)},
    ).split("\n\n")[0]
    assert [line.split()[0] for line in of_tables.splitlines() if "adam, all rows " in line] == ["C3"]


def test_the_role_that_pools_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = DataSection(format="csv", path=("none",), label="y", sparse=("a", "b"), vocabulary="hash(100)")
    config = RunConfig(
        cluster=ClusterSection(trainers=2),
        data=data,
        train=TrainSection(batch_size=1024),
        tables={"b": TableSection(placement='auto(pooled_by = "workers")')},
        dense=DenseSection(net="dcn_v2"),
    )
    print_plan(config, tmp_path, HOST, 5.0)
    of_tables = capsys.readouterr().out.split("\n\n")[0].splitlines()[1:]
    assert [line.split()[4] for line in of_tables] == ["trainers", "workers"]


def test_equal_workers_share_a_line(planned: Planned) -> None:
    """26 unsharded tables on 100 workers: most workers are empty."""
    of_workers = planned(workers=100).split("\n\n")[1].splitlines()
    assert len(of_workers) < 40
    assert re.search(r"(?m)^[\d, -]+ +0 +0 +0.00 +0.00$", "\n".join(of_workers))


@pytest.mark.parametrize(
    ("hosts", "line"),
    [
        (HOST, r"suffices: a host needs 0\.\d\d GiB of its 16.00 GiB"),
        (
            dataclasses.replace(HOST, memory_bytes=2.0**20),
            r"DOES NOT SUFFICE: a host needs 0\.\d\d GiB of its 0.00",
        ),
    ],
    ids=["enough", "too little"],
)
def test_memory(planned: Planned, hosts: Hosts, line: str) -> None:
    printed = planned(hosts=hosts)
    assert re.search(r"(?m)^memory      \d\.\d\d GiB a worker, \d\.\d\d GiB a trainer$", printed)
    assert re.search(rf"(?m)^            {line}", printed)


def test_the_speed_and_its_limit(planned: Planned) -> None:
    printed = planned(2, 2, Hosts(4, 1, math.inf, 1e6))
    assert re.search(r"(?m)^limited by  network of a host$", printed)
    rate, samples, milliseconds = re.findall(
        r"(?m)^samples/s   ([\d,]+) \(([\d,]+) samples in ([\d,.]+) ms", printed
    )[0]
    numbers = [float(text.replace(",", "")) for text in (rate, samples, milliseconds)]
    assert numbers[0] == pytest.approx(numbers[1] / numbers[2] * 1e3, rel=0.05)
    assert re.search(r"(?m)^limited by  trainers' cores \(\w.* \d+%, .*%\)$", planned())


def test_no_speed_without_measured_costs(planned: Planned) -> None:
    printed = planned(dense=DenseSection(remote_mlp=(8,)))
    assert "dense.remote_mlp" in printed.splitlines()[-1]

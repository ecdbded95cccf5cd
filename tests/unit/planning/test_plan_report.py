"""What ``hybrid plan`` prints: tables, workers, links, memory, speed, and what limits it."""

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
from workers.planning.costs import Costs
from workers.planning.forecast import Hosts
from workers.planning.plan_report import print_plan

HOST = Hosts(1, 4, 2.0**34, 1e9)
Planned: TypeAlias = Callable[..., str]


@pytest.fixture
def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Planned:
    """The plan of the built-in click log on so many trainers and workers."""

    def plan(trainers: int = 2, workers: int = 2, hosts: Hosts = HOST, **sections: object) -> str:
        cluster = ClusterSection(trainers=trainers, workers=workers)
        config = RunConfig(cluster=cluster, train=TrainSection(update="pipelined")).replace(**sections)
        print_plan(config, tmp_path, hosts, Costs.read(), None)
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


def test_tables_of_which_all_rows_take_every_step(planned: Planned) -> None:
    embedding = EmbeddingSection(optimizer="adam(weight_decay = 0.1)")
    all_rows = "adam(weight_decay = 0.1, all_rows = true)"
    of_tables = planned(
        embedding=embedding,
        tables={"C3": TableSection(optimizer=all_rows)},
    ).split("\n\n")[0]
    assert [line.split()[0] for line in of_tables.splitlines() if "adam, all rows " in line] == ["C3"]


def test_of_bags_it_says_who_pools_them_and_what_either_way_would_move(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = DataSection(
        format="csv", path=("none",), label="y", sparse=("a", "b"), vocabulary="hash", hash_rows=100
    )
    config = RunConfig(
        cluster=ClusterSection(trainers=2),
        data=data,
        train=TrainSection(batch_size=1024),
        tables={"b": TableSection(pooled_by="workers")},
        dense=DenseSection(net="dcn_v2"),
    )
    print_plan(config, tmp_path, HOST, Costs.read(), 5.0)
    heading, *of_tables = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert heading == "bags of pooled by MiB by workers MiB by trainers"
    # 2 x 512 samples: vectors of 16 and their gradients, and 5 ids each; or 100 rows for each trainer.
    by_workers, by_trainers = (f"{n / 2**20:.2f}" for n in (1024 * (2 * 16 * 4 + 4 + 20), 2 * 100 * 132))
    assert [line.split() for line in of_tables] == [
        ["a", "trainers", by_workers, by_trainers],
        ["b", "workers", by_workers, by_trainers],
    ]


def test_workers_that_are_alike_share_a_line(planned: Planned) -> None:
    """26 tables, whole, on 100 workers: most have nothing."""
    of_workers = planned(workers=100).split("\n\n")[1].splitlines()
    assert len(of_workers) < 40
    assert re.search(r"(?m)^[\d, -]+ +0 +0 +0.00 +0.00$", "\n".join(of_workers))


def test_links(planned: Planned) -> None:
    printed = planned(3, 5, dataclasses.replace(HOST, count=8))
    messages = dict(re.findall(r"(?m)^(\w+ -> \w+) +([\d,]+) +[\d.]+ +[\d.]+$", printed))
    # Every role has a host of its own: two messages a pair, and a ring of three trainers.
    assert messages == {
        "trainer -> worker": "15",
        "worker -> trainer": "15",
        "trainer -> trainer": "12",
        "host -> host": "42",
    }


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


@pytest.mark.parametrize(
    ("trainers", "workers", "network", "limit"),
    [
        (1, 8, math.inf, r"trainers' cores \([\w ]+ \d+%, [\w ]+ \d+%, [\w ]+ \d+%\)"),
        (64, 1, math.inf, r"workers' cores \((?:part|socket message) \d\d%, [\w ]+ \d+%, [\w ]+ \d+%\)"),
        (2, 2, 1e6, "network of a host"),
    ],
    ids=["trainers", "workers", "network"],
)
def test_limits(planned: Planned, trainers: int, workers: int, network: float, limit: str) -> None:
    hosts = Hosts(trainers + workers, 1, math.inf, network)
    printed = planned(trainers, workers, hosts)
    assert re.search(rf"(?m)^limited by  {limit}$", printed)
    rate, samples, milliseconds = re.findall(
        r"(?m)^samples/s   ([\d,]+) \(([\d,]+) samples in ([\d,.]+) ms", printed
    )[0]
    numbers = [float(text.replace(",", "")) for text in (rate, samples, milliseconds)]
    assert numbers[0] == pytest.approx(numbers[1] / numbers[2] * 1e3, rel=0.05)


def test_what_has_no_costs_has_no_speed(planned: Planned) -> None:
    printed = planned(dense=DenseSection(remote_mlp=(8,)))
    assert printed.splitlines()[-1] == "samples/s   not foretold, since dense.remote_mlp is set"

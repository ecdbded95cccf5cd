"""The points of the scaling bench: each once, and none held back that is fitted to."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from benchmark import scaling
from benchmark.__main__ import _DIMENSIONS
from benchmark.job import Job
from benchmark.results import Failure, Measurement
from benchmark.rounds import Task
from benchmark.scaling import BASE, HELD_BACK, VALUES, Point, _tasks, point
from rich.console import Console
from support.sampled import sampled

from workers.planning.costs import Costs

FITTED = {(d, value): point(d, value) for d, values in VALUES.items() for value in values}


def test_the_command_line_knows_every_dimension() -> None:
    assert tuple(VALUES) == _DIMENSIONS


def test_a_name_is_of_one_point() -> None:
    """So that the base shape, which many dimensions hold, is measured once."""
    points = {*map(repr, FITTED.values()), *map(repr, HELD_BACK)}
    assert len({p.workload.name for p in (*FITTED.values(), *HELD_BACK)}) == len(points)
    assert FITTED["trainers", 2] == FITTED["workers", 2] == FITTED["dim", 16] == Point(BASE)


def test_what_is_held_back_changes_several_things() -> None:
    for held in HELD_BACK:
        of_base = vars(BASE)
        changed = [name for name, value in vars(held.workload).items() if value != of_base[name]]
        assert len(set(changed) - {"name"}) >= 2, held.workload.name


@pytest.mark.parametrize(
    ("dimension", "update"),
    [("workers", "pipelined"), ("sync", "sync")],
)
def test_the_demand_is_of_what_is_run(dimension: str, update: str) -> None:
    of = FITTED[dimension, 8]
    assert of.config.train.update == update
    assert f"train.update={update}" in of.system.command
    assert of.demand.cluster.workers == 8
    assert of.config.train.batch_size == of.workload.global_batch


def test_dear_points_take_fewer_steps() -> None:
    points = [FITTED["dim", 16], FITTED["hotness", 64], FITTED["samples", 64]]
    tasks = _tasks(points, {p.workload.name: p.demand for p in points}, 200)
    steps = {task.job.workload.name: task.job.num_steps for task in tasks}
    assert steps["base"] == steps["samples 64"] == 200
    assert 20 <= steps["hotness 64"] < 100
    assert all(Job.from_text(task.job.to_text()) == task.job for task in tasks)


def test_each_point_grows_one_thing() -> None:
    for (dimension, value), of in FITTED.items():
        workload = of.workload
        same = {
            "trainers": workload.trainers == BASE.trainers,
            "workers": workload.workers == BASE.workers,
            "samples": workload.trainer_batch == BASE.trainer_batch,
            "tables": len(workload.table_rows) == len(BASE.table_rows),
            "rows": sum(workload.table_rows) == pytest.approx(sum(BASE.table_rows), rel=0.01),
            "dim": workload.dim == BASE.dim,
            "hotness": workload.hotness == BASE.hotness,
            "hidden": workload.dense == BASE.dense,
        }
        grown = {"sync": ["workers"], "gloo": ["trainers", "hidden"]}
        grown["peers"] = ["trainers", "hidden", "samples"]
        grown |= {"pooled": ["dim", "hotness"], "adagrad": ["dim"]}
        grown |= {"hidden": ["hidden", "samples"]}
        grown |= {"together": ["trainers", "workers"]}
        for name in grown.get(dimension, [dimension]):
            del same[name]
        assert all(same.values()), (dimension, value, same)
    assert len(FITTED["tables", 1000].workload.table_rows) == 1000
    assert sum(FITTED["rows", 50_000_000].workload.table_rows) == 50_000_000


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all points asked for, which cost what the package says; "dim 8" fails the first time."""
    points = {p.workload.name: p for p in (*FITTED.values(), *HELD_BACK)}
    asked: list[str] = []

    def pretend(tasks: Sequence[Task], console: Console) -> Iterator[Measurement | Failure]:
        for name in (task.job.workload.name for task in tasks):
            asked.append(name)
            if name == "dim 8" and asked.count(name) == 1:
                yield Failure(name, "ours-pipelined", "ended early")
            else:
                yield sampled(points[name], Costs.read()).measured

    monkeypatch.setattr(scaling, "measured", pretend)
    return asked


def test_one_command_leaves_costs_tables_and_a_picture(pretended: list[str], tmp_path: Path) -> None:
    options = argparse.Namespace(output=tmp_path, dimensions=list(VALUES), steps=200)
    assert scaling.run(options, Console(quiet=True)) == 0
    assert sorted(pretended) == sorted([*{p.workload.name for p in (*FITTED.values(), *HELD_BACK)}, "dim 8"])
    assert Costs.read(tmp_path / "costs.toml").trainer_seconds["socket_message"] > 0
    page = (tmp_path / "results.md").read_text()
    headings = [
        "As workers grow",
        "Points that were not fitted to",
        "A trillion parameters",
        "What messages take",
    ]
    assert [heading for heading in headings if f"## {heading}" not in page] == []
    assert (tmp_path / "results.png").stat().st_size > 10_000


def test_some_dimensions_alone_are_not_fitted_to(pretended: list[str], tmp_path: Path) -> None:
    options = argparse.Namespace(output=tmp_path, dimensions=["dim"], steps=200)
    assert scaling.run(options, Console(quiet=True)) == 0
    assert set(pretended) == {"base", *(f"dim {value}" for value in VALUES["dim"] if value != 16)}
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "results.md", "results.png"}

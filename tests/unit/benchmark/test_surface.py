"""The surface of the bench: its points, what they cost, and which is the worst."""

import dataclasses
import itertools

import pytest
import torch
from benchmark.covering import covering_rows
from benchmark.results import Measurement
from benchmark.start import bags_by_feature
from benchmark.surface import GRID, KNOWN, Point, _worst, comparable, job, workload
from benchmark.workloads import Workload

POINTS = [workload(**row) for row in (*KNOWN, *covering_rows(GRID))]


@pytest.mark.parametrize("strength", [1, 2])
def test_any_values_of_so_many_choices_meet_in_a_row(strength: int) -> None:
    choices = {"a": (1, 2, 3), "b": "xyz", "c": (False, True), "d": (None,)}
    rows = covering_rows(choices, strength)
    for names in itertools.combinations(choices, strength):
        wanted = set(itertools.product(*(choices[name] for name in names)))
        assert {tuple(row[name] for name in names) for row in rows} == wanted
    assert len(rows) == {1: 3, 2: 9}[strength]


def test_a_step_of_a_point_is_not_too_large_to_be_measured() -> None:
    for each in POINTS:
        ids = each.global_batch * len(each.table_rows) * each.hotness
        assert ids <= 1 << 21
        assert ids * each.dim <= 1 << 27
        assert 10 <= job(each, 3).num_steps <= 500
    assert any(each.trainer_batch == 4096 for each in POINTS)
    assert len({each.name for each in POINTS}) == len(POINTS)


@pytest.mark.parametrize("varies", [False, True])
def test_one_process_has_the_samples_of_all_trainers(varies: bool) -> None:
    each = workload(64, (2, 1), 3, 5, varies, 4, "sgd")
    for whole, *parts in zip(each.global_batches(), *map(each.batches, range(2)), strict=True):
        bags = bags_by_feature(whole.sparse_features)
        of_parts = [bags_by_feature(part.sparse_features) for part in parts]
        for k, (ids_L, offsets_B) in enumerate(bags):
            (first, first_starts), (second, second_starts) = (of[k] for of in of_parts)
            assert torch.equal(ids_L, torch.cat([first, second]))
            assert torch.equal(offsets_B, torch.cat([first_starts, second_starts + len(first)]))
        lengths = whole.sparse_features.offsets.diff()
        assert (lengths.min() == 0 and lengths.max() == 10) if varies else (lengths == 5).all()
        assert len(whole.labels) == 128


def measured(of: Workload, system: str, rate: float, cpu: float) -> Measurement:
    return Measurement(of.name, system, 1, 1_000_000, 1e6 / rate, {"other": cpu}, {}, (0.5,))


def point(of: Workload, ours: float, cpu: float) -> Point:
    systems = {
        "ours-pipelined": (ours, cpu),
        "one-process": (100.0, 20.0),
        "one-process-fbgemm": (100.0, 10.0),
        "torchrec-pipelined": (200.0, 15.0),
    }
    return Point(of, {name: measured(of, name, *values) for name, values in systems.items()})


def test_cost_is_over_the_best_process_and_speed_over_torchrec() -> None:
    cheap, dear, alone = POINTS[:3]
    points = [point(dear, 300.0, 25.0), point(cheap, 100.0, 12.0), Point(alone, {})]
    assert [(p.cost, p.speed) for p in points] == [(2.5, 1.5), (1.2, 0.5), (None, None)]
    assert _worst(points) == (
        f"slowest: {cheap.name}: cost 1.20, speed 0.50\nworst: {dear.name}: cost 2.50, speed 1.50"
    )
    assert _worst(points[2:]) == "no point was measured beside other systems"


def test_losses_are_compared_of_the_first_steps_and_not_of_adam() -> None:
    of = {name: next(p for p in POINTS if p.optimizer == name) for name in ("sgd", "adam")}
    losses = tuple(1 / step for step in range(1, 30))
    points = [
        Point(each, {"one-process": dataclasses.replace(measured(each, "one-process", 1, 1), losses=losses)})
        for each in of.values()
    ]
    (compared,) = comparable(points)
    assert (compared.workload, compared.losses) == (of["sgd"].name, losses[:10])

"""Fitting: known coefficients come back, none is negative, and predictions are told with the worst last."""

import dataclasses

import numpy as np
import pytest
from benchmark.fitting import fit, non_negative_least_squares, prediction_table
from benchmark.scaling import HELD_BACK, VALUES, Point, point
from support.sampled import CORES, sampled

from workers.planning.costs import Costs


def test_known_coefficients_are_recovered() -> None:
    matrix_PT = np.random.default_rng(0).random((40, 6)) * [1, 10, 1e3, 1e6, 1, 1]
    matrix_PT[:, 5] = 0
    known_T = np.array([3.0, 0.2, 5e-4, 1e-7, 0.0, 0.0])
    found_T = non_negative_least_squares(matrix_PT, matrix_PT @ known_T)
    assert found_T == pytest.approx(known_T, rel=1e-3, abs=1e-6)


def test_none_is_negative() -> None:
    """What would best be -1 is 0, and the rest the best there is then."""
    matrix_PT = np.array([[1.0, 1.0], [1.0, 0.0], [1.0, 2.0]])
    assert non_negative_least_squares(matrix_PT, matrix_PT @ [2.0, -1.0]) == pytest.approx([1.0, 0.0])


@pytest.fixture(scope="module")
def points() -> list[Point]:
    fitted = [point(d, value) for d, values in VALUES.items() for value in values]
    return list({p.workload.name: p for p in fitted}.values())


def test_costs_that_are_the_truth_are_found_and_foretell(points: list[Point]) -> None:
    truth = dataclasses.replace(Costs.read(), busy=0.9)
    costs = fit([sampled(p, truth) for p in points], "a test", CORES)
    assert costs.origin == "a test"
    assert costs.busy == pytest.approx(0.9, rel=0.01)
    for role in ("trainer_seconds", "worker_seconds"):
        for message in ("socket_message", "rpc_message"):
            assert getattr(costs, role)[message] == pytest.approx(getattr(truth, role)[message], rel=0.05)
    table = prediction_table([sampled(p, truth) for p in HELD_BACK], costs, CORES)
    assert table.title.startswith(f"Points that were not fitted to: {len(HELD_BACK)} of {len(HELD_BACK)} ")
    assert all(abs(float(cell) - 1) <= 0.02 for row in table.rows for cell in row[3:])


def test_the_worst_prediction_is_last(points: list[Point]) -> None:
    costs = Costs.read()
    samples = [sampled(p, costs, slower) for p, slower in zip(points, (2.0, 1.0, 0.7, 1.1), strict=False)]
    table = prediction_table(samples, costs, CORES)
    assert [row[3] for row in table.rows] == ["1.00", "1.10", "0.70", "2.00"] or [
        float(row[3]) for row in table.rows
    ] == pytest.approx([1.0, 1.1, 1 / 0.7, 2.0], abs=0.01)
    assert ": 2 of 4 within 20%" in table.title

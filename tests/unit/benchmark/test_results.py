"""What the bench makes of its measurements: ratios, losses that agree, tables, files."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmark import report
from benchmark.job import Job
from benchmark.results import (
    BFLOAT16_LOSS_TOLERANCE,
    LOSS_TOLERANCE,
    Failure,
    Measurement,
    disagreements,
    losses_by_step,
    split,
    summarise,
)
from benchmark.tables import TextTable
from benchmark.workloads import WORKLOADS

from hybrid.errors import ConfigError

LOSSES = tuple(0.7 - 0.001 * step for step in range(20))
SYNCHRONOUS = ["plain", "ours"]


def measurement(system: str, number: int, rate: float, losses: Sequence[float] = LOSSES) -> Measurement:
    """A round of 1000 samples."""
    used = {"trainer": 0.03, "other": 0.01}
    return Measurement("W", system, number, 1000, 1000 / rate, used, {"trainer": 2.0**20}, tuple(losses))


def changed(step: int, factor: float) -> list[float]:
    """The losses, that of one step multiplied."""
    return [loss * factor if k == step else loss for k, loss in enumerate(LOSSES, 1)]


def test_a_ratio_is_the_median_of_those_within_each_round() -> None:
    ours = [measurement("ours", number, rate) for number, rate in ((1, 20), (2, 12), (3, 100))]
    plain = [measurement("plain", number, rate) for number, rate in ((1, 10), (2, 10), (3, 100))]
    ours_summary, plain_summary = summarise([*ours, *plain], ["plain"])
    assert ours_summary.ratios == {"plain": pytest.approx(1.2)}  # 2, 1.2, 1; that of the medians is 2
    assert ours_summary.rounds == pytest.approx((20, 12, 100))
    assert ours_summary.samples_per_second == pytest.approx(20)
    assert plain_summary.ratios == {"plain": pytest.approx(1.0)}


def test_only_rounds_that_both_have_make_a_ratio() -> None:
    rounds = [measurement("ours", 1, 10), measurement("ours", 2, 30), measurement("plain", 2, 10)]
    assert summarise(rounds, ["plain"])[0].ratios == {"plain": pytest.approx(3.0)}
    apart = [measurement("ours", 1, 10), measurement("plain", 2, 10)]
    assert summarise(apart, ["plain", "absent"])[0].ratios == {}


def test_cpu_seconds_are_of_all_roles_for_a_million_samples() -> None:
    assert measurement("ours", 1, 10).cpu_seconds_per_million == pytest.approx(40.0)
    assert summarise([measurement("ours", 1, 10)], [])[0].cpu_seconds_per_million == pytest.approx(40.0)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(20, ["1", "2", "3", "10", "last"]), (10, ["1", "2", "3", "last"]), (1, ["last"])],
)
def test_losses_are_compared_at_the_first_steps_and_the_last(steps: int, expected: list[str]) -> None:
    chosen = losses_by_step(LOSSES[:steps])
    assert list(chosen) == expected
    assert chosen["last"] == LOSSES[steps - 1]
    assert chosen.get("3", LOSSES[2]) == LOSSES[2]


@pytest.mark.parametrize("step", [1, 2, 3, 10, 20])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_wrong_loss_of_a_synchronous_system_is_found(step: int, sign: int) -> None:
    plain = measurement("plain", 1, 10)
    for size, is_found in ((0.9, False), (1.1, True)):
        wrong = changed(step, 1 + sign * size * LOSS_TOLERANCE)
        rounds = [measurement("ours", 1, 10), measurement("ours", 2, 10, wrong), plain]
        found = disagreements(rounds, SYNCHRONOUS, "plain")
        assert [(d.system, d.number, d.reference) for d in found] == [("ours", 2, "plain")] * is_found
        assert [d.step for d in found] == [{20: "last"}.get(step, str(step))] * is_found


def in_bfloat16(system: str, losses: Sequence[float], parts: int) -> Measurement:
    return replace(measurement(system, 1, 10, losses), in_bfloat16=True, parts=parts)


@pytest.mark.parametrize("step", [1, 20])
@pytest.mark.parametrize(
    ("size", "references"),
    [
        (0.9 * LOSS_TOLERANCE, []),
        (1.1 * LOSS_TOLERANCE, ["first"]),
        (1.1 * BFLOAT16_LOSS_TOLERANCE, ["plain", "first"]),
    ],
)
def test_in_bfloat16_those_that_cut_batches_alike_agree_as_in_float32(
    step: int, size: float, references: list[str]
) -> None:
    """And the others as far as that precision goes."""
    apart = [loss * (1 + 0.5 * BFLOAT16_LOSS_TOLERANCE) for loss in LOSSES]
    wrong = [*apart]
    wrong[step - 1] *= 1 + size
    rounds = [in_bfloat16("plain", LOSSES, 1), in_bfloat16("first", apart, 2), in_bfloat16("b", wrong, 2)]
    found = disagreements(rounds, ["plain", "first", "b"], "plain")
    assert [(d.system, d.reference) for d in found] == [("b", reference) for reference in references]


def test_in_bfloat16_those_that_take_whole_batches_agree_as_in_float32() -> None:
    wrong = changed(3, 1 + 1.1 * LOSS_TOLERANCE)
    rounds = [in_bfloat16("b", wrong, 1), in_bfloat16("plain", LOSSES, 1), in_bfloat16("c", wrong, 2)]
    assert [d.system for d in disagreements(rounds, ["plain", "b", "c"], "plain")] == ["b"]


def test_a_loss_that_is_not_finite_agrees_with_nothing() -> None:
    for one, other in ((math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0)):
        plain = measurement("plain", 1, 10, changed(3, one))
        ours = measurement("ours", 1, 10, changed(3, other))
        assert "ours" in {d.system for d in disagreements([plain, ours], SYNCHRONOUS, "plain")}


def test_systems_that_are_not_synchronous_may_have_any_loss() -> None:
    rounds = [measurement("plain", 1, 10), measurement("async", 1, 10, changed(3, 2.0))]
    assert disagreements(rounds, SYNCHRONOUS, "plain") == []
    assert disagreements(rounds[1:], SYNCHRONOUS, "plain") == []


def test_without_the_reference_the_first_synchronous_system_is_right() -> None:
    rounds = [measurement("async", 1, 10), measurement("a", 1, 10), measurement("b", 1, 10, changed(3, 2.0))]
    (found,) = disagreements(rounds, ["b", "a"], "plain")
    assert (found.system, found.reference) == ("b", "a")
    said = "W, b, round 1: loss 1.396000 at step 3 is not 0.698000, that of a, to 1e-05 of its size"
    assert str(found) == said


def test_workloads_are_held_apart() -> None:
    other = replace(measurement("ours", 1, 10, changed(3, 2.0)), workload="V")
    assert disagreements([measurement("plain", 1, 10), other], SYNCHRONOUS, "plain") == []
    assert [s.ratios for s in summarise([measurement("plain", 1, 10), other], ["plain"])] == [
        {"plain": pytest.approx(1.0)},
        {},
    ]


def test_tables_show_ratios_failures_and_wrong_losses() -> None:
    results: list[Measurement | Failure] = [
        measurement("plain", 1, 1000),
        measurement("ours", 1, 2500, changed(2, 1.5)),
        measurement("ours", 2, 2500, changed(20, 1.5)),
        measurement("late", 1, 500, changed(2, 3.0)),
        Failure("W", "broken", "it broke"),
        Failure("V", "elsewhere", "it broke"),
    ]
    measurements, failures = split(results)
    summaries = summarise(measurements, ["plain"])
    found = disagreements(measurements, SYNCHRONOUS, "plain")
    titles = {name: name.title() for name in ("plain", "ours", "late", "broken", "elsewhere")}
    speed = report.speed_table("W", summaries, failures, titles, {"plain": "x plain"}, "trainer")
    assert speed.markdown().splitlines() == [
        "## W: speed",
        "",
        "| system | samples/s | of each round | x plain | CPU-s per million | MiB of a trainer |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| Plain | 1,000 | 1,000 | 1.00 | 40.0 | 1 |",
        "| Ours | 2,500 | 2,500 2,500 | 2.50 | 40.0 | 1 |",
        "| Late | 500 | 500 | 0.50 | 40.0 | 1 |",
        "| Broken | FAILED | - | - | - | - |",
    ]
    losses = report.loss_table("W", summaries, found, titles, SYNCHRONOUS)
    assert [row[-1] for row in losses.rows] == ["agrees", "WRONG", "not synchronous"]
    assert losses.rows[1][:3] == ("Ours", "0.70000", "1.04850")
    errors = report.error_lines(failures, found)
    assert [line.partition(" at ")[0] for line in errors] == [
        "ERROR: W, ours, round 1: loss 1.048500",
        "ERROR: W: it broke",
        "ERROR: V: it broke",
    ]


def test_a_bar_in_a_cell_does_not_end_it() -> None:
    assert TextTable("t", ["a|b"]).markdown().splitlines()[2] == r"| a\|b |"


def test_both_files_are_written_and_a_folder_is_not_used_twice(tmp_path: Path) -> None:
    folder = report.new_folder(tmp_path / "results", "bench")
    machine = {"cpu": "a CPU", "cores": 2, "memory_gib": 8.0, "load_average": 0.5}
    origin: dict[str, Any] = {
        "date": "today",
        "git_commit": "0123456789abcdef",
        "git_has_changes": True,
        "machine": machine,
        "versions": {".venv": {"python": "3.11"}},
    }
    raw = report.raw_results([measurement("ours", 1, 10, [math.nan, 1.0])], [], [], [])
    report.write(folder, "A title", origin, raw, ["A note."], [TextTable("A table", ["a"], [["1"]])])
    stored = json.loads((folder / "results.json").read_text())
    assert stored["machine"] == machine
    assert stored["measurements"][0]["losses"] == [None, 1.0]
    assert stored["measurements"][0]["samples_per_second"] == pytest.approx(10)
    text = (folder / "results.md").read_text()
    assert text.startswith(
        "# A title\n\na CPU, 2 cores, 8.0 GiB, load 0.5 before; .venv: python 3.11; today; "
    )
    assert "commit 0123456789ab with changes.\n\nA note.\n\n## A table\n\n| a |\n" in text
    with pytest.raises(ConfigError, match="holds results already"):
        report.new_folder(folder, "bench")


@pytest.mark.parametrize(
    ("workload", "length"),
    [
        (WORKLOADS["W2"], 7),
        (replace(WORKLOADS["W1"], trainers=3, dense={"bottom_mlp": (4, 2), "net": "a b:c"}), None),
        (replace(WORKLOADS["W1"], name="a name with 3 1 4"), None),
        (WORKLOADS["W2"].by("torch"), 7),
        (WORKLOADS["W3"].by("onednn"), None),
        (WORKLOADS["W1"].by("bfloat16"), None),
    ],
    ids=["by name", "varied", "renamed", "by torch", "by onednn", "by bfloat16"],
)
def test_a_job_comes_back_from_its_text(workload: Any, length: int | None) -> None:
    job = Job(workload, 3, 40)
    text = job.to_text()
    assert Job.from_text(text) == job
    assert length is None or len(text) == length

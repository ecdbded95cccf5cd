"""Values unknown to the model: their counts, expected counts, and warnings."""

import dataclasses
from pathlib import Path

import pytest
from support.samples import csv_config, prepared

from hybrid.data.dataset.dataset_manifest import DatasetReport, LabelReport
from hybrid.data.values.invalid_rows import InvalidRowReport
from workers.console.messages import data_notes, unknown_fractions

ROWS = [(i % 2, f"c{i % 4}", "|".join(["a", f"t{i}"][: i % 3])) for i in range(60)]


def write(path: Path, rows: list[tuple[int, str, str]]) -> Path:
    path.write_text("label,city,tags\n" + "".join(f"{label},{city},{tags}\n" for label, city, tags in rows))
    return path


def report_of(tmp_path: Path, rows: list[tuple[int, str, str]], minimum: int = 1) -> DatasetReport:
    config = csv_config(
        write(tmp_path / "train.csv", ROWS),
        sparse=("city", "tags"),
        multi_hot_separator="|",
        test_path=(str(write(tmp_path / "new.csv", rows)),),
        vocabulary=f"build({minimum})",
    )
    return prepared(config, tmp_path / "cache")[1].report


def test_unknown_values_are_counted_by_column(tmp_path: Path) -> None:
    rows = [(1, "c0", ""), (0, "nowhere", "a|new|newer"), (0, "", "a"), (1, "?", "|")]
    city, tags = report_of(tmp_path, rows).unknown
    assert (city.name, city.count, city.num_values, city.fraction) == ("city", 1, 2, 0.5)
    assert (tags.name, tags.count, tags.num_values, tags.fraction) == ("tags", 2, 4, 0.5)


@pytest.mark.parametrize(("minimum", "expected"), [(1, 20 / 60), (2, 20 / 60), (40, 1.0)])
def test_expected_unknown_fraction(tmp_path: Path, minimum: int, expected: float) -> None:
    """20 rows have only the tag "a", and 20 rows have "a" and a distinct tag."""
    city, tags = report_of(tmp_path, ROWS[1:], minimum).unknown
    assert city.expected == (minimum > 15)
    assert tags.expected == pytest.approx(expected)


def test_excess_of_unknown_values_is_a_warning(tmp_path: Path) -> None:
    report = report_of(tmp_path, [(label, f"city-{city}", tags) for label, city, tags in ROWS])
    (note,) = data_notes(report)
    assert note.startswith("warning: ")
    assert "100% of city (0% expected)" in note
    assert unknown_fractions(report.unknown) == "city 100.00%"
    assert report.unknown[1].count == 0


def test_several_ids_in_a_column_of_one_are_a_warning(tmp_path: Path) -> None:
    report = report_of(tmp_path, [(1, "c0|c0", "a"), (0, "c0|c1", "a"), (0, "c1", "a")])
    (note,) = data_notes(report)
    assert "2 row(s)" in note
    assert "columns.city.multi_hot_separator" in note


def test_split_by_time_gives_no_warning(tmp_path: Path) -> None:
    rows = "".join(f"{i % 2},{'new' if i > 90 else 'old'}{i % 3},{i}\n" for i in range(120))
    (tmp_path / "a.csv").write_text(f"label,item,day\n{rows}")
    config = csv_config(tmp_path / "a.csv", sparse=("item",), split="random(0.25)")
    data = dataclasses.replace(config.data, split="time(day, fraction = 0.25)")
    _, test = prepared(config.replace(data=data), tmp_path / "cache")
    assert (test.report.unknown[0].fraction, test.report.unknown[0].expected) == (29 / 30, None)
    assert not list(data_notes(test.report))


def test_undefined_auc_is_reported() -> None:
    report = DatasetReport(9, (LabelReport("label", "binary", 9, 1.0, 1, 1),), InvalidRowReport({}, ()))
    assert list(data_notes(report)) == ["all 9 evaluated rows have label 1: AUC is undefined for them"]
    report = DatasetReport(2, (LabelReport("label", "binary", 2, 0.5, 0, 1),), InvalidRowReport({}, ()))
    assert not list(data_notes(report))

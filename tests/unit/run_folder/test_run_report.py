"""The report of a run: what it shows, that it loads nothing, and that it escapes names from files."""

import json
import re
from pathlib import Path
from xml.etree.ElementTree import Element, fromstring

import pytest
from support import commands
from support.progress import METRICS, progress

from hybrid.config import RunConfig
from hybrid.config.sections import TrainSection
from workers.cli import main
from workers.run_folder.run_access import RESTARTS_FILE, RESULT_FILE
from workers.run_folder.run_files import RunFolder
from workers.run_folder.run_report import print_means

HOSTILE = "<script>alert('$x$')</script>\x1b"
TABLES = {HOSTILE: {"rows": 5000, "dim": 16, "bytes": 3 << 20, "workers": [0, 1]}}
PHASES = {"lookup": 1.0, HOSTILE: 2.0}
TEXT_TAGS = ("td", "th", "dt", "dd", "h1")
REFERENCES = ("src", "href", "action", "data", "srcset")


def parse(text: str) -> Element:
    """Return the elements of a page, each of which must be closed, except ``meta``."""
    return fromstring(re.sub(r"(<meta [^>]*)>", r"\1/>", text).replace("xlink:href", "href"))


def cells(page: Element) -> list[str]:
    return ["".join(each.itertext()) for each in page.iter() if each.tag in TEXT_TAGS]


def ids(page: Element) -> list[str]:
    return [each.attrib["id"] for each in page.findall(".//*[@id]")]


def written(path: Path, result: dict[str, object]) -> tuple[str, Element]:
    """Return the report of a run with 40 log steps, as text and parsed."""
    with RunFolder(path, RunConfig()) as folder:
        for step in range(1, 41):
            numbers = {"item.rows": 9.0, "item.unknown_fraction": 0.25}
            folder.log_progress(progress(step, phase_seconds=PHASES, numbers=numbers))
        folder.log("test", 40, METRICS)
        folder.log("unit", 40, METRICS, unit="day=1")
        folder.log("unknown", 0, {"user.unknown_fraction": 0.5})
        folder.write_report(result)
    text = folder.report.read_text()
    return text, parse(text)


def rows(page: Element, name: str, count: int) -> list[str]:
    """Return the ``count`` cells after the cell ``name``."""
    start = cells(page).index(name) + 1
    return cells(page)[start : start + count]


def test_a_report_has_result_unknown_values_tables_and_restarts(tmp_path: Path) -> None:
    restart = {"time": 1.5, "cause": "killed", "message": "lost worker 1", "step": 30, "resumed_step": 20}
    (run := tmp_path / HOSTILE.replace("/", "")).mkdir()
    (run / RESTARTS_FILE).write_text(f"{json.dumps(restart)}\n")
    text, page = written(run, {"auc": 0.7712, "steps": 40, "best": {"step": 20}, "tables": TABLES})
    assert text.count("<svg") == 4
    assert ">unit</text>" in text, "the legend of the curves"
    assert rows(page, "AUC", 1) == ["0.7712"]
    assert rows(page, "best step", 1) == ["20"]
    assert (rows(page, "user", 1), rows(page, "item", 1)) == (["50.00%"], ["25.00%"])
    assert rows(page, "1970-01-01 00:00:01 UTC", 4) == ["killed", "30", "20", "lost worker 1"]
    assert rows(page, r"<script>alert('$x$')</script>\x1b", 4) == ["5,000", "16", "3.0", "0, 1"]
    assert "synthetic_rows = " in text
    # It loads nothing, and escapes names.
    assert "\x1b" not in text
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & {x.tag for x in page.iter()}
    references = [x.attrib[name] for x in page.iter() for name in REFERENCES if name in x.attrib]
    assert all(each.startswith("#") and each[1:] in ids(page) for each in references)
    assert len(ids(page)) == len(set(ids(page))), "the plots share no ids"
    assert "http" not in text.replace("http-equiv", "")
    assert set(re.findall(r"url\((.)", text)) <= {"#"}


def test_a_stopped_run_has_the_numbers_of_its_last_log_step(tmp_path: Path) -> None:
    _, page = written(tmp_path / "run", {"tables": TABLES})
    assert rows(page, "loss", 1) == ["0.5000"]
    assert rows(page, "samples per second", 1) == ["1,000"]


def test_several_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    results: dict[str, dict[str, object]] = {
        "a": {"auc": 0.5, "steps": 40},
        "b": {"auc": 0.75, "best": {"step": 20}},
        "c": {"auc": 1.0},
    }
    for batch_size, (name, result) in enumerate(results.items(), 1):
        config = RunConfig(train=TrainSection(batch_size=batch_size))
        with RunFolder(tmp_path / name, config) as run:
            for step in (1, 2):
                run.log_progress(progress(step))
            run.log("test", 2, METRICS)
        (tmp_path / name / RESULT_FILE).write_text(json.dumps({**result, "tables": TABLES}))
    main(["report", *(str(tmp_path / name) for name in results), "--output", str(tmp_path / "all.html")])
    text = (tmp_path / "all.html").read_text()
    page = parse(text)
    assert rows(page, "AUC", 5) == ["0.5000", "0.7500", "1.0000", "0.7500", "0.2500"]
    assert rows(page, "best step", 5) == ["none", "20", "none", "", ""]
    assert text.count("<svg") == 12
    assert len(ids(page)) == len(set(ids(page))), "the plots share no ids"
    assert rows(page, "train.batch_size", 3) == ["1", "2", "3"]
    assert "train.epochs" not in cells(page)
    folder = str(tmp_path / "b")
    assert f" {folder}: cannot be written: " in commands.refusal("report", tmp_path / "a", "--output", folder)
    (tmp_path / "b" / RESULT_FILE).write_text("[]")
    assert folder in commands.refusal("report", folder, tmp_path / "a")


def test_means_of_undefined_and_missing_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    defined, undefined = {"auc": 0.5, "log_loss": 0.25}, {"auc": None, "log_loss": 0.75}
    means = print_means(RunConfig(), [defined, undefined])
    assert means["auc"] == {"mean": None, "deviation": None}
    assert means["log_loss"]["mean"] == 0.5
    assert capsys.readouterr().out.endswith(
        "\nAUC                 unknown\nlog loss            0.5000 ± 0.3536\n"
    )
    assert print_means(RunConfig(), [{"steps": 3}, {"steps": 4}]) == {}
    assert "no test rows" in capsys.readouterr().out

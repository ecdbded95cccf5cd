"""Commands and code of docs/serving.md, and the program that it names."""

import os
import re
import runpy
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT, code_block
from support.descriptors import redirected
from support.trained import predicted_columns, write_clicks, write_shop

from workers.cli import main

PAGE = "docs/serving.md"


@pytest.mark.parametrize(
    ("fixtures", "write", "more", "bad"),
    [
        (
            ("run", "served"),
            write_clicks,
            ["0,,3,nobody,7.00,a|other||b", "1,1e1,0,?, 7,"],
            [
                "0,much,3,u1,i1,a",
                "0,1_0,3,u1,i1,a",
                "0,1e39,3,u1,i1,a",
                "0,1,nan,u1,i1,a",
                "0,1,2,u1",
                "0,1,2,u1,i1,a,b",
                "0,1,2,u1,i1,a|b|c|d",
            ],
        ),
        (
            ("shop_run", "shop_served"),
            write_shop,
            [
                "?,?,?,?,?,,,0,0,0,0,1",
                "2024-02-29T23:59:59.5+02:00,1,65,u1,i1,a:b:1|?:2| a:1e-1,i1|?|i2|zz,0,0,0,0,1",
            ],
            [
                "2024-02-30,1,65,u1,i1,a:1,i1,0,0,0,0,1",
                "24:00,1,65,u1,i1,a:1,i1,0,0,0,0,1",
                "1706693400000,1,65,u1,i1,a:1,i1,0,0,0,0,1",
                "2024-02-01,1,old,u1,i1,a:1,i1,0,0,0,0,1",
                "2024-02-01,1,65,u1,i1,a:1|b,i1,0,0,0,0,1",
                "2024-02-01,1,65,u1,i1,a:-1,i1,0,0,0,0,1",
            ],
        ),
    ],
)
def test_the_documented_server_computes_the_predictions(
    request: pytest.FixtureRequest,
    fixtures: tuple[str, str],
    write: Callable[..., Path],
    more: list[str],
    bad: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With missing, unknown and differently written values, and invalid rows."""
    (run, served), new = map(request.getfixturevalue, fixtures), write(tmp_path / "new.csv", 80, seed=8)
    with new.open("a") as file:
        file.writelines(f"{line}\n" for line in (*bad, *more))
    expected = predicted_columns(run, new)
    capsys.readouterr()
    program = ROOT / "examples/serve_onnx.py"
    assert not re.search("(from|import) hybrid", program.read_text())
    monkeypatch.setattr(sys, "argv", [str(program), str(served), str(new)])
    runpy.run_path(str(program))
    lines = capsys.readouterr().out.splitlines()
    stop = 80 + len(bad)
    assert all(line.startswith(f"{row},invalid row: ") for row, line in enumerate(lines[80:stop], start=80))
    printed = [[float(each) for each in line.split(",")] for line in lines[:80] + lines[stop:]]
    assert [row for row, *_ in printed] == [*range(80), stop, stop + 1]
    for column, values in enumerate(expected.values(), start=1):
        assert [line[column] for line in printed] == pytest.approx(values.tolist(), abs=1e-6)
    assert len(printed[0]) == 1 + len(expected)


def test_the_documented_notebook_computes_the_predictions(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "runs/NAME")
    new = tmp_path / "new.csv"
    new.write_text("price,age,user,item,tags\n9.5,30,u7,i3,a|b\n")
    expected = predicted_columns(run, new)["probability"].tolist()
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(code_block(PAGE, "python", 'hybrid.load("runs/NAME'), found)
    assert found["probabilities"].tolist() == pytest.approx(expected, abs=1e-6)


def test_each_row_of_a_stream_is_predicted_at_once(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A client writes a row and waits for its line before it writes the next."""
    header, *rows = write_clicks(tmp_path / "new.csv", 5, seed=4).read_text().splitlines()
    (rows_read, rows_written), (read, written) = os.pipe(), os.pipe()
    lines_read: list[str] = []

    def run_client() -> None:
        with os.fdopen(rows_written, "w") as requests, os.fdopen(read) as lines:
            requests.write(f"{header}\n")
            for number, row in enumerate(rows):
                requests.write(f"{row}\n")
                requests.flush()
                while not (lines_read and lines_read[-1].startswith(f"{number},")):
                    lines_read.append(lines.readline())

    client = threading.Thread(target=run_client, daemon=True)
    client.start()
    with redirected(0, rows_read), redirected(1, written):
        main(["predict", str(run), "--input", "-", "--keep", "user"])
    client.join(10)
    for descriptor in (rows_read, written):
        os.close(descriptor)
    assert lines_read[0] == "row,user,probability\n"
    assert [line.split(",")[:2] for line in lines_read[1:]] == [
        [str(number), row.split(",")[3]] for number, row in enumerate(rows)
    ]
    assert "wrote 5 predictions to standard output" in capfd.readouterr().err

"""What is refused before anything starts: one line that names the key or the file, and nothing touched.

A subprocess would show nothing more, so these call the command's ``main`` here.
"""

from pathlib import Path

import pytest
from support.commands import settings

from hybrid.security.secret import VARIABLE
from workers.cli import main

GOOD = [f"{i % 2},{i}.5,v{i % 3}" for i in range(40)]
HEADER = "label,x,c"


def refused(*arguments: object) -> str:
    """The one line with which a command refuses."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert isinstance(end.value.code, str), "a message means exit code 1"
    assert "\n" not in end.value.code
    return end.value.code


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("launch --set train.epoch=3", "launch: train.epoch: no such key; did you mean train.epochs?"),
        (
            "launch --set dense.net=dlmr",
            "launch: dense.net = 'dlmr': must be one of dlrm, dcn_v2, deepfm, wide_deep, mmoe, ple, or "
            "module:function",
        ),
        (
            "launch --config nowhere.toml",
            "launch: nowhere.toml: cannot read the configuration: No such file or directory",
        ),
        (
            "compare --set train.update=async",
            "compare: train.update = 'async': must be sync or pipelined: the result of async "
            "depends on timing",
        ),
        (
            "compare --set embedding.wire_dtype=bfloat16",
            "compare: embedding.wire_dtype = 'bfloat16': must be rows: one process sends nothing, so it "
            "rounds nothing",
        ),
        ("compare --steps 0", "compare: --steps = 0: must be at least 1"),
        ("run own_loop", "run: SCRIPT = 'own_loop': is not a file"),
        ("launch --resume nothing", "launch: --resume = 'nothing': contains no run"),
        (
            "launch --resume . --config any.toml",
            "launch: --resume: uses the configuration of its run; use --set to change keys",
        ),
        ("plan --hosts 0", "plan: --hosts = 0: must be more than 0, and finite"),
        ("plan --hosts 5", "plan: --hosts = 5: must be at most the 4 trainers and workers"),
        ("plan --cores -1", "plan: --cores = -1: must be more than 0, and finite"),
        ("plan --memory nan", "plan: --memory = nan: must be more than 0, and finite"),
        ("plan --network inf", "plan: --network = inf: must be more than 0, and finite"),
        (
            "plan --ids 3",
            'plan: --ids = 3.0: needs data.vocabulary = "hash": other tables have the rows of their data',
        ),
        ("evaluate .", "evaluate: .: there is no checkpoint here"),
        ("predict . --output p.csv", "predict: .: there is no checkpoint here"),
        ("export . --output served", "export: .: there is no checkpoint here"),
        (
            "export . --output served --map a=b",
            "export: --map: needs --format tables: it names the tables in that file",
        ),
        ("import w.pt --into . --output new --map a=b", "import: .: there is no checkpoint here"),
        (
            "import w.pt --into . --output new --map a*=b",
            "import: --map = 'a*=b': must be NAME=TABLE, with as many * on the left as on the right",
        ),
    ],
)
def test_what_cannot_be_done(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(*command.split()) == f"hybrid {said}"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("lines", "overrides", "message"),
    [
        (
            [HEADER, *(row.rpartition(",")[0] for row in GOOD)],
            {},
            "{path}: no row can be used, 40 of 40 as line 2: 2 columns, expected 3; check data.columns and "
            "data.delimiter",
        ),
        (
            [HEADER, *(f"yes{row[1:]}" for row in GOOD)],
            {},
            "{path}: no row can be used, 40 of 40 as line 2: label is 'yes', expected '1' or '0'; set "
            "data.positive_labels and data.negative_labels",
        ),
        ([HEADER], {}, "no row is left to train on; check data.path and data.test_fraction"),
        ([], {}, "{path}: the file is empty, expected a header line; check data.path"),
        (
            [HEADER, *GOOD[:7], "2,7.5,v1", *GOOD[8:]],
            {"max_invalid_fraction": 0.0},
            "{path}:9: label is '2', expected '1' or '0'; set data.positive_labels and data.negative_labels, "
            "or skip such rows with data.max_invalid_fraction = 0.1",
        ),
        ([], {"path": "no.csv"}, "no.csv: no such file or folder; check data.path"),
        ([HEADER, *GOOD], {"test_path": "no.csv"}, "no.csv: no such file or folder; check data.test_path"),
        ([HEADER, *GOOD], {"dense": "xx"}, "data.dense = 'xx': {path} has no such column; did you mean 'x'?"),
    ],
    ids=["width", "labels", "no rows", "empty", "one bad row", "no file", "no test file", "no column"],
)
def test_input_that_cannot_be_used(
    lines: list[str], overrides: dict[str, str], message: str, tmp_path: Path
) -> None:
    """By a command that prepares the data and starts nothing."""
    path = tmp_path / "rows.csv"
    path.write_text("".join(f"{line}\n" for line in lines))
    data = {"format": "csv", "path": path, "dense": "x", "sparse": "c", "cache_folder": tmp_path / "cache"}
    assert refused("plan", *settings(data=data | overrides)) == f"hybrid plan: {message.format(path=path)}"


@pytest.mark.parametrize("command", ["launch", "compare", "master"])
def test_a_misspelt_column_is_refused_before_a_process_starts(command: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("".join(f"{line}\n" for line in [HEADER, *GOOD]))
    given = settings(
        data={"format": "csv", "path": path, "dense": "xx", "sparse": "c"}, run={"folder": tmp_path / "run"}
    )
    rule = f"{path} has no such column; did you mean 'x'?"
    assert refused(command, *given) == f"hybrid {command}: data.dense = 'xx': {rule}"
    assert [each.name for each in tmp_path.iterdir()] == ["rows.csv"]


@pytest.mark.parametrize("command", ["launch", "master"])
def test_a_folder_that_holds_a_run(command: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("precious\n")
    before = snapshot(tmp_path)
    line = refused(command, *settings(run={"folder": tmp_path}))
    rule = f"run.folder = '{tmp_path}': contains a run already; choose another folder, or remove it"
    assert line == f"hybrid {command}: {rule}"
    assert snapshot(tmp_path) == before


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, rule in (("file", "is a file"), ("file/run", "cannot be made: Not a directory")):
        line = refused("launch", *settings(run={"folder": tmp_path / folder}))
        assert line == f"hybrid launch: run.folder = '{tmp_path}/{folder}': {rule}; choose another folder"


def test_another_model_than_the_run_to_resume(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[embedding]\ndim = 12\n")
    before = snapshot(tmp_path)
    line = refused("launch", "--resume", tmp_path, "--set", "embedding.dim=8")
    rule = "the run to resume has 12; keep that, or start a new run"
    assert line == f"hybrid launch: embedding.dim = 8: {rule}"
    assert snapshot(tmp_path) == before


def test_predictions_overwrite_nothing(tmp_path: Path) -> None:
    (tmp_path / "out.csv").write_text("precious\n")
    before = snapshot(tmp_path)
    line = refused("predict", tmp_path, "--output", tmp_path / "out.csv")
    rule = "exists already; choose another --output, or remove it"
    assert line == f"hybrid predict: {tmp_path}/out.csv: {rule}"
    assert snapshot(tmp_path) == before


NO_SECRET = f"must be set, or {VARIABLE}, for roles started by hand; hybrid secret FILE makes one"


@pytest.mark.parametrize(
    ("role", "rule"),
    [
        ("worker --index -1 --master a", "--index = -1: must be at least 0"),
        (
            "worker --index 0 --master a:b",
            "--master = 'a:b': must be HOST or HOST:PORT, an IPv6 address in [ ]",
        ),
        (
            "worker --index 0 --master a --set embedding.dim=8",
            "embedding.dim: is decided by the master; set it there",
        ),
        (
            "trainer --index 0 --master a --set dense.divice=cpu",
            "dense.divice: no such key; did you mean dense.device?",
        ),
        ("master", f"cluster.secret_file: {NO_SECRET}"),
        ("worker --index 0 --master a", f"cluster.secret_file: {NO_SECRET}"),
    ],
)
def test_a_role_by_hand_that_has_no_place(role: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    name = role.partition(" --master")[0].replace(" --index", "")
    assert refused(*role.split()) == f"hybrid {name}: {rule}"


@pytest.mark.parametrize("more", ["--config run.toml", "--script train.py", "--resume auto"])
def test_a_role_by_hand_has_everything_else_from_its_master(
    more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["worker", "--index", "0", "--master", "a", *more.split()])
    assert end.value.code == 2
    assert f"error: unrecognized arguments: {more}\n" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^hybrid worker 0: --master: must be given: HOST or HOST:PORT"):
        main(["worker", "--index", "0"])

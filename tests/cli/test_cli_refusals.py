"""Requests that are refused before anything starts: one line names the key or file, and no file changes.

These tests call the command's ``main`` in this process; a subprocess would show nothing more.
"""

from pathlib import Path

import pytest
from support.commands import refusal, settings

from hybrid.security.secret import VARIABLE
from workers.cli import main

GOOD = [f"{i % 2},{i}.5,v{i % 3}" for i in range(40)]
HEADER = "label,x,c"


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("command", "place", "remedy"),
    [
        ("launch --set train.epoch=3", "train.epoch:", "did you mean train.epochs?"),
        ("launch --config nowhere.toml", "nowhere.toml:", "No such file or directory"),
        ("compare --set train.update=async", "train.update = 'async':", "sync or lookahead"),
        ("compare --set embedding.wire_dtype=bfloat16", "embedding.wire_dtype = 'bfloat16':", "must be rows"),
        ("compare --steps 0", "--steps = 0:", "at least 1"),
        ("run train", "SCRIPT = 'train':", ""),
        (f"run {'x' * 300}", f"{'x' * 300}:", "File name too long"),
        ("master --script train.py", "SCRIPT = 'train.py':", ""),
        ("master --script train.py --resume run", "--resume = 'run':", "cluster.resume"),
        ("launch --resume nothing", "--resume = 'nothing':", ""),
        ("launch --resume . --config any.toml", "--resume:", "use --set"),
        ("plan --hosts 5", "--hosts = 5:", "at most the 4"),
        ("plan --memory -1", "--memory = -1.0:", ""),
        ("plan --network inf", "--network = inf:", ""),
        ("plan --ids 3", "--ids = 3.0:", 'data.vocabulary = "hash"'),
        ("launch --seeds 1", "--seeds = 1:", "at least 2"),
        ("launch --seeds 2 --resume run/seed-1", "--resume = 'run/seed-1':", "auto"),
        ("launch --seeds 2 --set run.seed=-1", "run.seed = -1:", ""),
        ("launch --seeds 2 --set run.folder=ftp://a/b", "ftp://a/b:", ""),
        ("evaluate .", ".:", ""),
        ("export . --output served", ".:", ""),
    ],
)
def test_impossible_request_is_refused(
    command: str, place: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refusal(*command.split())
    assert line.startswith(f"hybrid {command.split()[0]}: {place} ")
    assert remedy in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["launch", "compare", "master", "plan"])
def test_misspelled_column_is_refused_before_a_process_starts(command: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("".join(f"{line}\n" for line in [HEADER, *GOOD]))
    data = {"format": "csv", "path": path, "dense": "xx", "sparse": "c"}
    line = refusal(command, *settings(data=data, run={"folder": tmp_path / "run"}))
    assert line.startswith(f"hybrid {command}: data.dense = 'xx': {path} ")
    assert line.endswith("did you mean 'x'?")
    assert [each.name for each in tmp_path.iterdir()] == ["rows.csv"]


@pytest.mark.parametrize("command", ["launch", "master"])
def test_folder_with_a_run_is_refused(command: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("precious\n")
    before = snapshot(tmp_path)
    line = refusal(command, *settings(run={"folder": tmp_path}))
    assert line.startswith(f"hybrid {command}: run.folder = '{tmp_path}': ")
    assert snapshot(tmp_path) == before


def test_run_is_not_resumed_with_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[embedding]\ndim = 12\n")
    files = snapshot(tmp_path)
    line = refusal("launch", "--resume", tmp_path, "--set", "embedding.dim=8")
    assert line.startswith("hybrid launch: embedding.dim = 8: the run to resume has 12; ")
    assert snapshot(tmp_path) == files


@pytest.mark.parametrize(
    ("role", "place", "remedy"),
    [
        ("worker --index -1 --master a", "--index = -1:", "at least 0"),
        ("worker --index 0 --master a:b", "--master = 'a:b':", "HOST or HOST:PORT"),
        ("worker --index 0 --master a --set embedding.dim=8", "embedding.dim:", "master"),
        ("trainer --index 0 --master a --set dense.divice=cpu", "dense.divice:", "dense.device"),
        ("master", "cluster.secret_file:", "hybrid secret FILE"),
        ("worker --index 0 --master a", "cluster.secret_file:", VARIABLE),
        ("worker --index 0", "--master:", "HOST or HOST:PORT"),
        ("role --master a", "role:", "needs RANK and WORLD_SIZE, or SLURM_PROCID"),
    ],
)
def test_invalid_role_is_refused(role: str, place: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "node0")  # of another job
    line = refusal(*role.split())
    assert line.startswith(f"hybrid {role.partition(' --master')[0].replace(' --index', '')}: {place} ")
    assert remedy in line


@pytest.mark.parametrize(
    "command",
    ["worker --config run.toml", "worker --script train.py", "worker --resume auto", "role -- train.py"],
)
def test_arguments_of_another_command_are_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(command.split())
    assert end.value.code == 2
    assert command.partition(" ")[2] in capsys.readouterr().err

"""A run whose folder is the URL of a store: the same bits, on whichever machine it goes on."""

import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.commands import TrainedRun, output_of, run, settings
from support.stores import BUCKET, Proxy, Store

from hybrid.checkpoint import folders
from hybrid.checkpoint.reader import Checkpoint
from hybrid.storage import files, stores
from hybrid.storage.places import Place, place
from workers.cli import main

RUN = f"s3://{BUCKET}/runs/clicks"


def rows_of(folder: Place) -> dict[str, str]:
    """What tables hold, whatever their split, and the checksum of the dense net."""
    stored = Checkpoint.open(folder)
    tables = {
        name: stored.whole_rows(name, (rows, dim)).numpy().tobytes().hex()
        for name, (rows, dim, _) in stored.manifest.tables.items()
    }
    return tables | {"dense": stored.manifest.files["dense.safetensors"][1]}


AT_START = [
    ["launch", "--resume", RUN],
    ["launch", "--resume", "auto", *settings(run={"folder": RUN})],
    ["launch", *settings(run={"folder": RUN})],
    ["role", "--master", "127.0.0.1", "--resume", RUN],
    ["evaluate", RUN],
    ["predict", RUN, "--output", "predictions.csv"],
]


@pytest.mark.parametrize(("fate", "code"), [("503", 75), ("gone", 75), ("403", 1)])
def test_whether_another_start_may_help_where_a_store_gives_nothing(
    store: Store,
    fate: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stores, "ATTEMPTS", 1)
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(store))
        proxy.plan = lambda method, path: fate
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{proxy.address}")
        if fate == "gone":
            stack.close()
        for arguments in AT_START:
            with pytest.raises(SystemExit) as end:
                main([str(each) for each in arguments])
            said = str(end.value) if isinstance(end.value.code, str) else capsys.readouterr().err.rstrip("\n")
            assert said.startswith(f"hybrid {arguments[0]}: {RUN}"), said
            assert "\n" not in said
            assert (1 if isinstance(end.value.code, str) else end.value.code) == code, said


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_run_in_a_store_is_resumed_elsewhere_resharded_evaluated_and_pruned(
    store: Store, trained: TrainedRun, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = place(RUN)
    keys = [*tiny, *settings(run={"folder": RUN}, checkpoint={"every_steps": 5, "keep_last": 2})]
    said = output_of(["launch", *keys, *settings(train={"max_steps": 12})], tmp_path, afresh=True)
    assert f"and sent to {RUN} with each checkpoint" in said
    assert not (tmp_path / "runs").exists()
    ended = run(["launch", *keys], tmp_path, afresh=True)
    assert (ended.code, "holds a run already" in ended.stderr) == (1, True)
    # Another machine: nothing of what this one has kept is there.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    more = settings(train={"max_steps": 16}, cluster={"workers": 3})
    said = output_of(["launch", "--resume", RUN, *more], tmp_path, afresh=True)
    assert f"going on from step 12: {RUN}/checkpoints/step-00000012" in said
    assert f"hybrid evaluate {RUN}" in " ".join(said.split())
    whole = trained.folder / "checkpoints/step-00000016"
    assert rows_of(there / "checkpoints" / "step-00000016") == rows_of(whole)
    steps = [folders.step_of(each) for each in folders.stored(there)]
    assert steps == [16, 15]
    lines = [json.loads(line) for line in files.read_text(there / "metrics.jsonl").splitlines()]
    expected = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [[each["loss"] for each in some if each["kind"] == "train"] for some in (lines, expected)]
    assert losses[0] == losses[1]
    assert {"config.toml", "result.json", "logs"} <= {each.place.name for each in files.entries(there)}
    shown = [output_of(["evaluate", each], tmp_path, afresh=True) for each in (RUN, trained.folder)]
    numbers = [re.findall(r"\d\.\d{4}", text) for text in shown]
    assert numbers[0] == numbers[1] != []

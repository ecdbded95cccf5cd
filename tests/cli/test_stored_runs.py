"""Runs in a store: they have the same bits, on any machine that resumes them."""

import json
import re
import signal
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.commands import Command, TrainedRun, output_of, run, settings, started
from support.stopped_runs import saved_steps
from support.stores import BUCKET, Proxy, Store

from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.storage import files, object_stores
from hybrid.storage.remote_path import StoragePath, parse_path
from workers.cli import main

RUN = f"s3://{BUCKET}/runs/clicks"


def rows_of(folder: StoragePath) -> dict[str, str]:
    """Return the content of tables, independent of their split, and the checksum of the dense net."""
    stored = Checkpoint.open(folder)
    tables = {
        name: stored.read_rows(name, (rows, dim)).numpy().tobytes().hex()
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


@pytest.mark.parametrize(("response", "code"), [("503", 75), ("gone", 75), ("403", 1)])
def test_exit_code_says_whether_a_restart_may_help_with_a_failed_store(
    store: Store,
    response: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(object_stores, "ATTEMPTS", 1)
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(store))
        proxy.plan = lambda method, path: response
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{proxy.address}")
        if response == "gone":
            stack.close()
        for arguments in AT_START:
            with pytest.raises(SystemExit) as end:
                main([str(each) for each in arguments])
            has_line = isinstance(end.value.code, str)  # and exit code 1
            message = str(end.value) if has_line else capsys.readouterr().err.rstrip("\n")
            assert message.startswith(f"hybrid {arguments[0]}: {RUN}"), message
            assert "\n" not in message
            assert (1 if has_line else end.value.code) == code, message


@dataclass
class Strikes:
    """Kills, each at the first request that matches a pattern; the store never receives that request.

    Attributes:
        left: a regular expression and the role to kill, for each further kill; "launch" kills all processes.
        command: the launch.
    """

    left: list[tuple[str, str]]
    command: Command | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, method: str, path: str) -> str | None:
        with self.lock:
            if not self.left or not re.search(self.left[0][0], f"{method} {path}"):
                return None
            _, victim = self.left.pop(0)
        assert self.command is not None
        if victim == "launch":
            for each in self.command.processes():
                each.kill()
        else:
            self.command.role(victim).kill()
        return "cut"


@pytest.mark.long
def test_run_killed_while_files_are_sent_is_resumed_by_the_same_command(
    store: Store, trained: TrainedRun, tiny: list[str], tmp_path: Path
) -> None:
    base = f"s3://{BUCKET}/killed"
    keys = [*tiny, *settings(run={"folder": f"{base}/run"}, data={"cache_folder": f"{base}/prepared"})]
    keys += [*settings(checkpoint={"every_steps": 5}), "--resume", "auto"]
    strikes = Strikes(
        [
            ("PUT .*/train/ids.npy", "master"),
            ("PUT .*step-00000005/parts", "worker 1"),
            ("PUT .*step-00000010/manifest.json", "launch"),
        ]
    )
    with Proxy(store) as proxy:
        proxy.plan = strikes
        variables = {"AWS_ENDPOINT_URL": f"http://{proxy.address}"}
        with started(["launch", *keys], tmp_path, afresh=True, variables=variables) as strikes.command:
            ended = strikes.command.wait(150.0)
        assert (ended.code, strikes.left) == (-signal.SIGKILL, []), ended
        killed = re.findall(
            r"^hybrid launch: (.+) \(pid \d+\) was killed by SIGKILL", ended.stderr, re.MULTILINE
        )
        assert killed == ["master", "worker 1"]
        parts = f"{base}/run/checkpoints/step-00000010"
        assert [each.path.name[:6] for each in files.list_entries(parse_path(parts))] == ["parts-"]
        strikes.left = [("PUT .*step-00000015/parts", "trainer 1")]
        with started(["launch", *keys], tmp_path, afresh=True, variables=variables) as strikes.command:
            ended = strikes.command.wait(150.0)
    assert (ended.code, strikes.left) == (0, []), ended
    assert "resuming from step 5" in ended.stdout
    assert rows_of(parse_path(f"{base}/run/checkpoints/step-00000016")) == rows_of(
        trained.folder / "checkpoints/step-00000016"
    )
    left = [each.path.name for each in files.list_entries(parse_path(f"{base}/run/checkpoints"))]
    assert left == ["step-00000015", "step-00000016"]


@pytest.mark.long
def test_stored_run_is_resumed_on_another_machine_resharded_evaluated_and_pruned(
    store: Store, trained: TrainedRun, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = parse_path(RUN)
    keys = [*tiny, *settings(run={"folder": RUN}, checkpoint={"every_steps": 5, "keep_last": 2})]
    printed = output_of(["launch", *keys, *settings(train={"max_steps": 12})], tmp_path, afresh=True)
    assert f"and sent to {RUN} with each checkpoint" in printed
    assert not (tmp_path / "runs").exists()
    ended = run(["launch", *keys], tmp_path, afresh=True)
    assert (ended.code, f"run.folder = '{RUN}'" in ended.stderr) == (1, True)
    # Another machine has none of the local state.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    more = settings(train={"max_steps": 16}, cluster={"workers": 3})
    printed = output_of(["launch", "--resume", RUN, "--trust-code", *more], tmp_path, afresh=True)
    assert f"resuming from step 12: {RUN}/checkpoints/step-00000012" in printed
    assert f"hybrid evaluate {RUN}" in " ".join(printed.split())
    whole = trained.folder / "checkpoints/step-00000016"
    assert rows_of(there / "checkpoints" / "step-00000016") == rows_of(whole)
    assert saved_steps(there) == [16, 15]
    lines = [json.loads(line) for line in files.read_text(there / "metrics.jsonl").splitlines()]
    expected = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [[each["loss"] for each in some if each["kind"] == "train"] for some in (lines, expected)]
    assert losses[0] == losses[1]
    assert {"config.toml", "result.json", "logs"} <= {each.path.name for each in files.list_entries(there)}
    shown = [
        output_of(["evaluate", each, "--trust-code"], tmp_path, afresh=True) for each in (RUN, trained.folder)
    ]
    numbers = [re.findall(r"\d\.\d{4}", text) for text in shown]
    assert numbers[0] == numbers[1] != []

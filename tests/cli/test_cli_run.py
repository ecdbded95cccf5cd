"""``hybrid run SCRIPT`` and ``hybrid compare SCRIPT``: a script on every trainer."""

import json
import re
import signal
from pathlib import Path

import pytest
from support.cluster import CaseError, Clusters, run_script
from support.commands import Command, code_block, eventually, output_of, run, settings, started

SCRIPT = """
import sys, time
from pathlib import Path
import torch
from torch import nn
import hybrid

class Net(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.table = hybrid.Embedding(rows, 2, ids="id")
        self.even = hybrid.Embedding(5, 2, ids="id", optimizer=hybrid.Momentum(lr=0.1))
        self.linear = nn.Linear(2, 1)
        self.unused = nn.Linear(1, 1) if kind == "unused layer" else None

    def forward(self, ids):
        vectors = self.table(ids) if cluster.step % 2 else self.table(ids) + self.even(ids)
        return self.linear(vectors).view(-1)

kind = sys.argv[1]
cluster = hybrid.connect("other.toml" if "clips" in kind else None)
if "prepares" in kind:
    data, _ = cluster.prepare()
    cluster.print(len(data), sorted(data.num_rows))
cluster.print("trainers:", cluster.world_size, kind)
if kind == "exits":
    sys.exit(3)
if kind == "ends" and cluster.rank == 1:
    sys.exit()
model = cluster.distribute(Net(5 + (kind == "differs") * cluster.rank))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = {"id": torch.arange(8) % 5, "label": torch.ones(8)}
if "resumes" in kind:
    cluster.resume("run", optimizer, every_steps=1)
for batch in cluster.batches(data, size=2 if "resumes" in kind else 4):
    step = Path(f"at-{cluster.step}")
    if "stops" in kind and cluster.rank == 0 and not step.exists():
        step.touch()
        time.sleep(60)
    if kind == "leaves" and cluster.step == cluster.rank == 1:
        break
    if "raises" in kind and cluster.step == 1 and cluster.rank == 1:
        batch["missing"]
    loss = (model(batch["id"]) - batch["label"]) ** 2
    if kind == "plain backward":
        loss.mean().backward()
    cluster.backward(loss)
    if "clips" in kind:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
with torch.inference_mode():
    for batch in cluster.batches(data) if kind != "leaves" else ():
        assert len(model(batch["id"] + 0)) == len(batch["label"])
if "resumes" in kind:
    cluster.print([values.tolist() for values in model.parameters()])
cluster.print("steps:", cluster.step)
if "prepares" in kind:
    cluster.save("saved")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


@pytest.fixture(scope="module")
def ended_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a script that prepares data, and makes calls that have no effect."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "other.toml").write_text("[data]\nsynthetic_rows = 7\n")
    sizes = ["--trainers", "2", "--workers", "1", *settings(data={"synthetic_rows": 300})]
    return folder, output_of(["run", "train.py", *sizes, "--", "prepares, clips"], folder)


def test_script_receives_data_and_arguments_and_trainer_0_prints(ended_run: tuple[Path, str]) -> None:
    folder, printed = ended_run
    assert "\n300 ['" in printed
    assert "\ntrainers: 2 prepares, clips\n" in printed
    assert printed.endswith("\nsteps: 2\n")
    assert {"features.json", "data.json"} <= {each.name for each in (folder / "saved").iterdir()}


def test_calls_with_another_effect_on_a_cluster_cause_a_warning(ended_run: tuple[Path, str]) -> None:
    assert ended_run[1].count("train.clip_norm") == 1
    assert ended_run[1].count("--config other.toml") == 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("resumes, raises", "train.py:43, in <module>: KeyError: 'missing'"),
        ("leaves", "; trainer 1 was already at its end"),
    ],
)
def test_failure_of_a_script_is_one_line(kind: str, message: str, script: Path, tmp_path: Path) -> None:
    sizes = ["--trainers", "2", "--workers", "1", *settings(cluster={"timeout_seconds": 5.0})]
    ended = run(["run", script.name, *sizes, "--", kind], tmp_path)
    assert ended.code == 1
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("exits", r"train\.py .*sys\.exit\(3\)"),
        ("ends", "different requests"),
        ("differs", "different tables"),
        ("plain backward", r"cluster\.backward\(loss\)"),
        ("unused layer", r"unused\.weight"),
    ],
)
def test_wrong_script_is_a_one_line_error(kind: str, message: str, script: Path, clusters: Clusters) -> None:
    with pytest.raises(CaseError, match=message) as caught:
        clusters.get(2, 1).run(run_script, str(script), kind, dtype="float32")
    assert "\n" not in str(caught.value).partition("\n\nTraceback")[0]


def test_killed_script_resumes_with_the_result_of_an_uninterrupted_one(script: Path, tmp_path: Path) -> None:
    (tmp_path / "uninterrupted/run/checkpoints/step-00000002").mkdir(parents=True)  # in the way
    command = ["run", script, "--trainers", "2", "--workers", "1", "--"]
    *printed, parameters, steps = output_of([*command, "resumes"], tmp_path / "uninterrupted").splitlines()
    assert [line[:32] for line in printed if "warning" in line] == ["warning: no checkpoint of step 2"]
    command.append("resumes, stops")

    def await_step(running: Command, step: int) -> None:
        assert eventually((tmp_path / f"at-{step}").exists), running.stderr

    def line(role: str, start: str) -> str:
        return rf"hybrid run: {role} \(pid \d+\) was killed by SIGKILL; see \S+; {start}\n"

    with started(command, tmp_path) as running:
        await_step(running, 0)
        running.role("trainer 1").kill()
        await_step(running, 1)
        running.process.send_signal(signal.SIGINT)
        ended = running.wait()
    stopped = "hybrid run: stopped; step 1 is saved; the same command resumes\n"
    assert ended.code == 130
    lines = line("trainer 1", "starting from the beginning") + stopped
    assert re.fullmatch(lines, ended.stderr), ended.stderr
    with started(command, tmp_path) as running:
        await_step(running, 2)
        (tmp_path / "at-3").touch()  # no further stop
        second = run(command, tmp_path)
        assert (second.code, second.stderr.count("\n")) == (1, 1)
        assert second.stderr.startswith(f"hybrid run: cluster.resume = '{tmp_path / 'run'}': ")
        running.role("master").kill()
        ended = running.wait()
    assert ended.code == 0
    assert re.fullmatch(line("master", "resuming from step 2"), ended.stderr), ended.stderr
    assert ended.stdout.splitlines()[-2:] == [parameters, steps]
    assert not Path(ended.stderr.rpartition("see ")[2].partition("; ")[0]).exists()


def test_example_of_the_readme_trains(tmp_path: Path) -> None:
    script = code_block("README.md", "python", "hybrid.connect").replace("50_000", "4_000")
    (tmp_path / "train.py").write_text(script)
    printed = output_of(["run", "train.py", "--trainers", "2", "--workers", "1"], tmp_path)
    first, second = (float(line.rpartition(" ")[2]) for line in printed.splitlines()[-2:])
    assert second < first < 0.7


def test_compare_measures_the_difference_of_a_script_from_one_process(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ["--trainers", "2", "--workers", "1"]
    adam = SCRIPT.replace("optim.SGD(model.parameters(), lr=0.1)", "optim.Adam(model.parameters())")
    script.write_text(adam + "1 / (cluster.step - 1)\n")  # the script ends at the last step compared
    printed = output_of(["compare", script.name, *sizes, "--steps", "1", "--", "trains"], tmp_path)
    assert "table table" in printed
    assert len(re.findall(r"module: linear\.(?:weight|bias) ", printed)) == 2
    assert "parameter 0" not in printed
    assert re.search(r"equal up to rounding; \d+ of 12 tensors are the same bit for bit\n$", printed)
    monkeypatch.setenv("COLUMNS", "60")  # too few for the table: names are folded, numbers are not
    script.write_text(SCRIPT.replace("return self.linear", "return (1 + cluster.rank) * self.linear"))
    ended = run(["compare", script.name, *sizes, "--steps", "2", "--json", "--", "trains"], tmp_path)
    assert ended.code == 1
    assert "--dtype float64" in ended.stderr
    assert "over 1000 times" in ended.stderr
    result = json.loads(ended.stdout)
    assert result["is_equal"] is False
    assert result["tensors"]["module: linear.weight"]["of_tolerance"] > 1000


def test_compare_tries_the_size_of_the_last_batch(script: Path, tmp_path: Path) -> None:
    """The nine samples leave a last batch of one, for which squeeze removes the dimension of samples."""
    nine = SCRIPT.replace("data = {", "data = cluster.prepare()[0] or {").replace('"id"', '"C1"')
    nine = nine.replace("Net(5", "Net(9").replace("Embedding(5", "Embedding(9")
    script.write_text(nine.replace(".view(-1)", ".squeeze()[:]"))
    sizes = ["--trainers", "1", "--workers", "1", *settings(data={"synthetic_rows": 9})]
    ended = run(["compare", script.name, *sizes, "--steps", "1", "--", "trains"], tmp_path)
    assert ended.code == 1
    assert "0-dim" in ended.stderr


def test_compare_refuses_more_steps_than_the_script_takes(script: Path, tmp_path: Path) -> None:
    sizes = ["--trainers", "1", "--workers", "1"]
    ended = run(["compare", script.name, *sizes, "--steps", "9", "--", "trains"], tmp_path)
    assert (ended.code, ended.stderr.count("\n")) == (1, 1)
    assert "--steps: " in ended.stderr

"""Scripts that end at any step and start again, by ``cluster.resume``."""

import itertools
import random
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import forge
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, SequentialLR
from torch.utils.data import DataLoader

import hybrid
from hybrid.checkpoint.checkpoint_folders import DENSE_FILE, list_checkpoints, parse_step, step_folder
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.errors import CheckpointError, ConfigError, DataError
from hybrid.loggers.record_file import METRICS_FILE, read_records
from hybrid.storage.locked_folders import folder_lock

pytestmark = pytest.mark.filterwarnings("ignore:the learning rate of the optimizer has changed")
EPOCHS, STEPS = 3, 4  # steps per epoch
LAST = EPOCHS * STEPS


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = hybrid.Embedding(9, 4, ids="id", optimizer=hybrid.Adam(lr=0.1))
        self.rest = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.rest(self.table(batch["id"])).squeeze(1)
        return out


class Noisy(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples with random numbers of all generators."""

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = random.random() + np.random.random() + torch.rand(()).item()
        return {"id": index % 9, "label": float(index % 2), "noise": noise}


TEST = {"id": torch.arange(9), "label": torch.arange(9) % 2}


def train(
    root: Path, every: int = 3, stop: int = -1, update: str = "sync", kind: str = "epochs", most: int = 99
) -> dict[str, Any]:
    """Run a script, which ends after step ``stop``; return its final state and its evaluations by step."""
    (root / "config.toml").write_text(
        f'[train]\nupdate = "{update}"\nbatch_size = 4\nmax_steps = {most}\n'
        '[checkpoint]\nkeep_last = 2\nkeep_best = "log_loss"\n'
        f'[data]\nformat = "csv"\npath = ["{root}/clicks.csv"]\nsparse = ["id"]\nsplit = "random(0.2)"\n'
        f'cache_folder = "{root}/cache"\n'
    )
    (root / "clicks.csv").write_text("label,id\n" + "".join(f"{i % 2},{i % 7}\n" for i in range(20)))
    cluster = hybrid.connect(root / "config.toml")
    data = cluster.prepare()[0] if kind == "prepared" else DataLoader(Noisy(), batch_size=4, shuffle=True)
    model = cluster.distribute(Net())
    weight, bias = model.parameters()
    optimizers: list[Any] = [
        torch.optim.Adam([weight], lr=0.1),
        torch.optim.SGD([bias], lr=0.1, momentum=0.9),
    ]
    cosine: list[Any] = [CosineAnnealingLR(optimizers[1], 4) for _ in range(2)]
    schedulers: list[Any] = [MultiStepLR(optimizers[0], [2, 7]), SequentialLR(optimizers[1], cosine, [5])]
    cluster.resume(root / "run", *optimizers, *schedulers, every_steps=every)
    epochs: Iterable[int] = range(EPOCHS) if kind == "range" else cluster.epochs(EPOCHS)
    found: dict[str, Any] = {}
    for _ in epochs:
        for batch in itertools.chain(*(cluster.batches(data) for _ in range(1 + (kind == "two passes")))):
            noise = batch["noise"].float() if "noise" in batch else 0.0
            loss = (model(batch) - batch["label"].float() - noise) ** 2
            cluster.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            cluster.log({"loss": loss.mean()})
            if cluster.step == stop:
                raise SystemExit
            if kind == "left" and cluster.step % 3 == 0:
                break
        metrics = cluster.evaluate(TEST)
        found[f"loss {cluster.step}"] = metrics["log_loss"]
        cluster.log(metrics)
    cluster.log({"last": cluster.step})
    cluster.save(root / f"final-{cluster.step}")  # which a finished script that is started again repeats
    states = [each.state_dict() for each in (*optimizers, *schedulers)]
    return {"module": cluster.plain_module().state_dict(), "states": states, "step": cluster.step, **found}


def check_equal(found: Any, expected: Any) -> None:
    """Compare two structures bit for bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_calls_of_log_that_record_nothing_are_errors(tmp_path: Path) -> None:
    cluster = hybrid.connect()
    cluster.distribute(Net())
    with pytest.raises(RuntimeError, match=r"cluster\.resume"):
        cluster.log({"loss": 1.0})
    cluster.resume(tmp_path / "run")
    for name in ("step", "unit"):
        with pytest.raises(ValueError, match=name):
            cluster.log({name: 1.0})
    assert read_records(tmp_path / "run" / METRICS_FILE) == []


def logged(root: Path) -> list[dict[str, Any]]:
    return [{**record, "time": 0.0} for record in read_records(root / "run" / METRICS_FILE)]


@pytest.mark.parametrize(
    ("kind", "every", "update"),
    [
        *(pytest.param("epochs", every, "lookahead", marks=pytest.mark.long) for every in (1, 3)),
        ("epochs", STEPS, "lookahead"),
        ("left", 3, "lookahead"),
        ("two passes", STEPS, "sync"),
        ("range", 3, "lookahead"),
        ("prepared", 3, "sync"),
    ],
)
def test_a_script_that_is_ended_anywhere_has_the_bits_of_an_uninterrupted_one(
    kind: str, every: int, update: str, tmp_path: Path
) -> None:
    """With every_steps = STEPS, a checkpoint follows the last step of a pass."""
    (tmp_path / "other").mkdir()
    expected = train(tmp_path / "other", every, update=update, kind=kind)
    draw = random.Random(f"{kind} {every} {update}")
    for stop in sorted(draw.sample(range(1, expected["step"]), 2)):
        with pytest.raises(SystemExit):
            train(tmp_path, every, stop, update, kind)
    found = train(tmp_path, every, update=update, kind=kind)
    assert len([*tmp_path.glob("run/**/*.parquet")]) == (kind == "prepared")  # a vocabulary, once per run
    shared = found.keys() & expected.keys()  # an evaluation before the last checkpoint is not repeated
    assert {"module", "states", "step"} < shared
    check_equal({name: found[name] for name in shared}, {name: expected[name] for name in shared})
    check_equal(train(tmp_path, every, update=update, kind=kind)["module"], expected["module"])
    assert logged(tmp_path) == logged(tmp_path / "other")


class Script:
    """A script whose epochs have two passes and an evaluation between them.

    Attributes:
        trained: the values of ``number`` of the trained samples.
        evaluated: the evaluations.
    """

    def __init__(self, root: Path, size: int, stop: int = -1, kind: str = "dict", **changes: Any) -> None:
        rows = 24 // (2 if changes.get("half") else 1)
        number = torch.arange(rows)
        data: Any = {"id": number % 9, "label": number % 2, "number": number}
        (root / "clicks.csv").write_text(
            "label,id,number\n" + "".join(f"{i % 2},{i % 7},{i}\n" for i in range(24))
        )
        (root / "config.toml").write_text(
            f'[data]\nformat = "csv"\npath = ["{root}/clicks.csv"]\nsparse = ["id"]\ndense = ["number"]\n'
            f'numeric_scaling = "none"\nsplit = "none"\ncache_folder = "{root}/cache"\n'
        )
        cluster = hybrid.connect(root / "config.toml")
        if kind == "prepared":
            data, _ = cluster.prepare()
        if kind == "batches":
            data = [{name: each[i : i + size] for name, each in data.items()} for i in range(0, rows, size)]
        model = cluster.distribute(Net())
        optimizer = torch.optim.Adam(model.parameters(), lr=changes.get("lr", 0.1))
        schedule = CosineAnnealingLR(optimizer, changes.get("length", 8))
        cluster.resume(root / "run", optimizer, schedule, every_steps=1)
        self.trained: list[int] = []
        self.evaluated: list[float] = []
        for _ in cluster.epochs(1):
            for _ in range(2):
                chunks = (each for each in data) if kind == "batches" else data
                for batch in cluster.batches(chunks, None if kind == "batches" else size):
                    if cluster.step == stop:
                        return
                    cluster.backward((model(batch) - batch["label"].float()) ** 2)
                    optimizer.step()
                    schedule.step()
                    number = batch["dense"].view(-1) if kind == "prepared" else batch["number"]
                    self.trained += number.long().tolist()
                self.evaluated.append(cluster.evaluate(TEST)["log_loss"])


@pytest.mark.parametrize(
    ("kind", "then"), [("dict", 3), ("dict", 12), ("batches", 5), ("prepared", 3), ("prepared", 12)]
)
def test_another_batch_size_trains_each_sample_once(kind: str, then: int, tmp_path: Path) -> None:
    first = Script(tmp_path, 8, stop=5, kind=kind)  # after two batches of the second pass
    second = Script(tmp_path, then, kind=kind)
    assert len(first.trained) == 24 + 16
    assert sorted((first.trained + second.trained)[24:]) == list(range(24))
    assert second.evaluated[:1] == first.evaluated
    assert len(second.evaluated) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": 0.2}, ["lr of Adam", ": 0.1, and 0.2 now"]),
        ({"length": 9}, ["T_max of CosineAnnealingLR", ": 8, and 9 now"]),
        ({"half": True}, ["pass 0 of epoch 0", "length 12; ", "24"]),
        ({}, []),
    ],
)
def test_a_changed_script_warns(changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    Script(tmp_path, 8, stop=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Script(tmp_path, 8, stop=3, **changes)
    shown = " ".join(str(each.message) for each in caught if "checkpoint" in str(each.message))
    assert all(word in shown for word in words), shown
    assert bool(shown) == bool(words), shown


def test_a_script_in_async_mode_takes_all_steps(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        train(tmp_path, stop=7, update="async")
    assert train(tmp_path, update="async")["step"] == EPOCHS * STEPS


@pytest.mark.parametrize("most", [STEPS, STEPS + 1])
def test_max_steps_can_be_raised(most: int, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    expected = train(tmp_path / "other")
    first, found = train(tmp_path, most=most), train(tmp_path)
    assert first["step"] == most
    check_equal(found["module"], expected["module"])


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    expected = train(tmp_path / "other")
    with pytest.raises(SystemExit):
        train(tmp_path, stop=8)
    newest = list_checkpoints(tmp_path / "run")[0]
    (newest / DENSE_FILE).write_bytes(b"damaged")
    with pytest.warns(UserWarning, match=newest.name):
        check_equal(train(tmp_path)["module"], expected["module"])
    for folder in list_checkpoints(tmp_path / "run"):
        (folder / DENSE_FILE).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="run"):
        train(tmp_path)


def test_one_run_at_a_time_uses_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with folder_lock(tmp_path / "run"), pytest.raises(ConfigError, match=r"^cluster\.resume = '.*/run': "):
        train(tmp_path)
    train(tmp_path)
    assert capsys.readouterr().out.count("step 12") == 0
    train(tmp_path)  # of this process
    assert f"{tmp_path / 'run'}: all 3 epoch(s) are done at step 12" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="cluster"), folder_lock(tmp_path / "run", "cluster"):
        raise AssertionError


@pytest.mark.parametrize(
    ("obstructed", "kept", "best"),
    [(None, [12, 9, 4], 4), (6, [12, 9, 4], 4), (STEPS, [12, 9], 12), (LAST, [9, 6, 4], 4)],
)
def test_best_evaluation_is_kept(obstructed: int | None, kept: list[int], best: int, tmp_path: Path) -> None:
    """A loop goes on if a checkpoint cannot be written, except the last. The first evaluation is the best."""
    context: Any = nullcontext()
    if obstructed is not None:
        step_folder(tmp_path / "run", obstructed).mkdir(parents=True)
        context = pytest.warns(UserWarning, match=f"step {obstructed}: ")
    if obstructed == LAST:
        context = pytest.raises(CheckpointError, match=f"step {LAST}: .* step 9$")
    with context:
        found = train(tmp_path)
        assert found[f"loss {STEPS}"] < min(found["loss 8"], found["loss 12"])
    assert [parse_step(folder) for folder in list_checkpoints(tmp_path / "run")] == kept
    assert Checkpoint.best_valid(tmp_path / "run", print).manifest.step == best


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    cluster = hybrid.connect()
    optimizer = torch.optim.SGD(cluster.distribute(Net()).parameters(), lr=0.1)
    odd_objects: list[Any] = [nn.Linear(1, 1), MultiStepLR(optimizer, [1 << 64])]
    for call, odd in itertools.product((cluster.save, cluster.resume), odd_objects):
        with pytest.raises(DataError, match=r"(Linear .* Tensor|MultiStepLR .* int);"):
            call(tmp_path / "odd", odd)
    cluster.save(tmp_path / "saved", optimizer)
    with pytest.raises(CheckpointError, match=r"of 1 .* of 2"):
        cluster.load(tmp_path / "saved", optimizer, optimizer)
    groups = torch.optim.SGD([{"params": [each]} for each in nn.Linear(4, 1).parameters()], lr=0.1)
    for other in (groups, MultiStepLR(optimizer, [2])):
        with pytest.raises(CheckpointError, match=f"{type(other).__name__} .* SGD$"):
            cluster.load(tmp_path / "saved", other)
    with pytest.raises(ValueError, match="every_steps"):
        cluster.resume(tmp_path / "run", every_steps=0)
    with pytest.raises(CheckpointError, match="/saved: is a checkpoint"):
        cluster.resume(tmp_path / "saved", optimizer)
    cluster = hybrid.connect()
    cluster.distribute(Net())
    cluster.resume(tmp_path / "run")
    with pytest.raises(RuntimeError, match="first step"):
        cluster.resume(tmp_path / "run")
    cluster = hybrid.connect()
    cluster.distribute(Net())
    next(cluster.batches(TEST, size=3))
    with pytest.raises(RuntimeError, match="first step"):
        cluster.resume(tmp_path / "run")


def set_state(index: int, name: object, value: object) -> Callable[[dict[str, Any]], object]:
    """Return a function that sets a field in the stored state of an object."""

    def change(fields: dict[str, Any]) -> None:
        state = fields["progress"]["objects"][index]
        (state[0] if index == 0 else state)["pairs"].append([name, value])

    return change


def set_progress(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    """Return a function that sets a field of the stored progress."""
    return lambda fields: fields["progress"].update({name: value})


HOSTILE = [
    *(set_state(0, *each) for each in (("lr", "x"), ("betas", "xy"), ("__class__", "os"), ([1], 2))),
    *(set_state(1, *each) for each in (("get_lr", "x"), ("optimizer", 1), ("step", "x"), ("_last_lr", 3))),
    *(set_progress("position", value) for value in (None, {"a": 1}, [*"abcd"], [-3, 0, 0, 0], [1] * 5)),
    *(set_progress("position", value) for value in ([0, 0, 0, 2**60], [0, 0, 2**60, 0])),
    *(set_progress("objects", value) for value in (None, "ab", [[{"x": 1}], {}], [[{"pairs": [[1]]}], {}])),
]


def test_a_hostile_state_is_refused(tmp_path: Path) -> None:
    cluster = hybrid.connect()
    adam = torch.optim.Adam(cluster.distribute(Net()).parameters(), lr=0.1)
    objects = adam, MultiStepLR(adam, [2])
    for number, change in enumerate(HOSTILE):
        cluster.save(saved := tmp_path / f"saved-{number}", *objects)
        forge(saved, change)
        with pytest.raises(CheckpointError, match=rf"^{saved}"):
            cluster.load(saved, *objects)
    cluster.save(tmp_path / "good", *objects)
    forge(tmp_path / "good", set_state(0, "capturable", True))  # which a CPU does not have
    cluster.load(tmp_path / "good", *objects)
    assert not adam.param_groups[0]["capturable"]
    for path in (tmp_path / "good/tables").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"~")
    with pytest.raises(CheckpointError, match="altered"):
        cluster.load(tmp_path / "good", *objects)


@pytest.mark.parametrize("update", ["sync", "lookahead"])
def test_a_checkpoint_can_be_loaded_after_a_pass_was_left(update: str, tmp_path: Path) -> None:
    """Updates that are running, and lookups that wait, must not reach the loaded rows."""
    (tmp_path / "config.toml").write_text(f'[train]\nupdate = "{update}"\n')
    cluster, rows = hybrid.connect(tmp_path / "config.toml"), 50_000
    table = hybrid.Embedding(rows, 16, ids="", optimizer=hybrid.Adam(lr=0.1, all_rows=True))
    model = cluster.distribute(nn.Sequential(table))

    def take_two_steps() -> Tensor:
        for ids in itertools.islice(cluster.batches(torch.arange(rows), size=9), 2):
            cluster.backward(model(ids).sum(1))
        weight: Tensor = cluster.plain_module().state_dict()["0.weight"]
        return weight

    take_two_steps()
    cluster.save(tmp_path / "saved")
    expected = take_two_steps()
    for ids in itertools.islice(cluster.batches(torch.arange(rows), size=9), 3):
        cluster.backward(model(ids).sum(1))
    cluster.load(tmp_path / "saved")
    assert cluster.step == 2
    check_equal(take_two_steps(), expected)

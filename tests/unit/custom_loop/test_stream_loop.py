"""Custom loops on a stream: the rows of each step, restarts at any step, and calls that are refused."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.shared_memory import together
from torch import Tensor, nn

import hybrid
from hybrid.checkpoint.checkpoint_folders import step_folder
from hybrid.config.loading import load_config
from hybrid.custom_loop.backend import Backend
from hybrid.custom_loop.local_batches import Slicing
from hybrid.custom_loop.stream_data import StreamData
from hybrid.errors import CheckpointError, ConfigError, DataError

BATCH, DAYS, ROWS = 16, 3, 100
LAST = DAYS * -(-ROWS // BATCH)  # the last step
DRAWN: dict[int, list[int]] = {}  # the negatives of each step, which are the same in all runs


def write_day(root: Path, day: int, num_rows: int = ROWS, files: int = 4) -> None:
    """Write the rows of a day, which have different numbers; ``number % 4`` tags each."""
    folder = root / f"log/day={day}"
    folder.mkdir(parents=True)
    numbers = torch.arange(100 * day, 100 * day + num_rows)
    for part, some in enumerate(numbers.chunk(files)):
        columns = {
            "label": (some % 2).tolist(),
            "number": some.tolist(),
            "scaled": some.tolist(),
            "user": (some % 13).tolist(),
            "tags": [[f"t{i}" for i in range(n)] for n in (some % 4).tolist()],
            "importance": (some % 3).tolist(),
        }
        pq.write_table(pa.table(columns), folder / f"{part}.parquet")


def configure(root: Path, stream: str = "files(lanes = 4)", **train: object) -> Path:
    keys = {"batch_size": BATCH, **train}
    file = root / "config.toml"
    file.write_text(
        f'[data]\nformat = "parquet"\npath = ["{root}/log/day=*"]\nstream = "{stream}"\n'
        'dense = ["number", "scaled"]\nsparse = ["user", "tags"]\n'
        'vocabulary = "grow"\nweight = "importance"\n[columns.number]\nnumeric_scaling = "none"\n'
        "[train]\n" + "".join(f"{key} = {value!r}\n" for key, value in keys.items())
    )
    return file


class Net(nn.Module):
    def __init__(self, data: Any) -> None:
        super().__init__()
        growing: dict[str, Any] = {"growing": True, "optimizer": hybrid.Adam(lr=0.1)}
        assert data.num_rows == {"user": 0, "tags": 0}
        self.user = hybrid.Embedding(None, 3, ids="user", **growing)
        self.tags = hybrid.EmbeddingBag(None, 3, ids="tags", pooled_by="trainers", **growing)
        self.head = nn.Linear(6 + len(data.dense_columns), 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        columns = [self.user(batch["user"]), self.tags(batch["tags"]), batch["dense"] / 400]
        outputs: Tensor = self.head(torch.cat(columns, 1)).squeeze(1)
        return outputs


def train(
    root: Path,
    stop: int = -1,
    passes: int = 0,
    before: Callable[[Any, Any], object] = lambda *_: None,
    **keys: Any,
) -> tuple[dict[int, list[int]], dict[str, Tensor]]:
    """Run a script, which ends after step ``stop``; return the numbers of each step, and the final model.

    Args:
        passes: number of steps after which the script leaves a pass over the stream; 0 to read to its end.
    """
    cluster = hybrid.connect(configure(root, **keys))
    stream = cluster.stream()
    model = cluster.distribute(Net(stream))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before(cluster, stream)
    cluster.resume(root / "run", optimizer, every_steps=3)
    steps: dict[int, list[int]] = {}
    step = -1
    while cluster.step > step:
        step = cluster.step
        batches = cluster.batches(stream, negatives={"drawn": hybrid.Negatives(3, torch.zeros(1000))})
        for batch in itertools.islice(batches, passes or None):
            assert DRAWN.setdefault(cluster.step, batch["drawn"].tolist()) == batch["drawn"].tolist()
            assert stream.unit == f"{root}/log/day={1 + cluster.step // (LAST // DAYS)}"
            loss = (model(batch) - batch["label"]) ** 2
            steps[cluster.step] = batch["dense"][:, 0].long().tolist()
            cluster.backward(loss, batch["label.weights"])
            optimizer.step()
            if cluster.step == stop:
                raise SystemExit
    cluster.save(root / f"final-{cluster.step}")
    loaded: Any = hybrid.load(root / f"final-{cluster.step}", Net(stream))
    users = {"user": torch.arange(13), "tags": hybrid.Jagged.of([[]] * 13), "dense": torch.zeros(13, 2)}
    return steps, {"scores": loaded(users), "head": loaded.head.weight, "step": torch.tensor(cluster.step)}


@pytest.mark.parametrize(("update", "passes"), [("sync", 0), ("lookahead", 5)])
def test_script_ended_anywhere_loses_and_repeats_no_row(update: str, passes: int, tmp_path: Path) -> None:
    """At step 7 a folder ends. The last folder comes late, when the first one is gone."""
    (tmp_path / "other").mkdir()
    for folder, day in itertools.product((tmp_path, tmp_path / "other"), range(1, DAYS + 1)):
        if (folder, day) != (tmp_path, DAYS):
            write_day(folder, day)
    expected, model = train(tmp_path / "other", passes=passes, update=update)
    assert [len(rows) for rows in expected.values()] == DAYS * [*[BATCH] * (ROWS // BATCH), ROWS % BATCH]
    assert sorted(itertools.chain(*expected.values())) == [*range(100, 100 + DAYS * ROWS)]
    for stop in (7, 8):
        with pytest.raises(SystemExit):
            train(tmp_path, stop, passes, update=update)
    assert max(train(tmp_path, passes=passes, update=update, max_steps=10)[0]) == 9
    assert [*train(tmp_path, passes=passes, update=update)[0]] == [10, 11, 12, 13]
    (tmp_path / "log/day=1").rename(tmp_path / "gone")
    write_day(tmp_path, DAYS)
    with pytest.raises(SystemExit):
        train(tmp_path, 17, passes, update=update)
    found, again = train(tmp_path, passes=passes, update=update)
    assert found == {step: rows for step, rows in expected.items() if step >= 15}
    torch.testing.assert_close(again, model, rtol=0, atol=0)


def test_trainers_read_the_rows_of_one_process(tmp_path: Path) -> None:
    """The second day has rows in one lane only, and the third has fewer rows than trainers."""
    write_day(tmp_path, 1)
    write_day(tmp_path, 2, 20, files=1)
    write_day(tmp_path, 3, 1, files=1)
    config = load_config(configure(tmp_path))

    def read(rank: int, group: Any) -> list[Any]:
        stream = StreamData(Backend(config, rank, group, None), lambda _: None)
        steps: list[Any] = []
        while stream.open(len(steps), lambda: None):
            steps += stream.slices(Slicing())
            stream.advance_to(len(steps))
        return steps

    (whole,), trainers = together(1, read), together(3, read)
    for step, (alone, *slices) in enumerate(zip(whole, *trainers, strict=True)):
        parts = [{name: each.values[name][: each.size] for name in ("dense", "label")} for each in slices]
        for name in ("dense", "label"):
            joined = torch.cat([part[name] for part in parts])
            assert sorted(joined.flatten().tolist()) == sorted(alone.values[name].flatten().tolist()), step
        for each in slices:
            numbers = each.values["dense"][:, 0].long()
            assert each.global_size == alone.size
            assert len(numbers) == each.padded_size >= min(1, each.global_size)
            assert set(numbers.tolist()) <= set(alone.values["dense"].flatten().tolist())
            assert torch.equal(each.values["tags"].lengths, numbers % 4)
            assert torch.equal(each.values["label.weights"], numbers % 3 / 1.0)
            assert len(each.values["user"]) == len(numbers)
    assert len(whole) == 7 + 2 + 1


@pytest.mark.parametrize(
    ("before", "error", "message"),
    [
        (lambda cluster, stream: cluster.batches(stream, size=8), ValueError, r"train\.batch_size"),
        (lambda cluster, stream: cluster.batches(stream, whole="user"), ValueError, r"train\.batch_size"),
        (lambda cluster, stream: cluster.batches(stream, drop_last=True), ValueError, r"train\.batch_size"),
        (lambda cluster, stream: cluster.evaluate(stream), RuntimeError, "read once"),
        (
            lambda cluster, stream: [cluster.batches(stream) for _ in cluster.epochs(1)],
            RuntimeError,
            r"epochs",
        ),
        (lambda cluster, _: cluster.prepare(), ConfigError, r"data\.stream .* cluster\.stream\(\)"),
    ],
)
def test_wrong_use_is_an_error_of_one_line(
    before: Callable[[Any, Any], object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    write_day(tmp_path, 1)
    with pytest.raises(error, match=message) as raised:
        train(tmp_path, before=before)
    assert "\n" not in str(raised.value)


def test_stream_comes_after_other_data_and_before_a_resume(tmp_path: Path) -> None:
    write_day(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"data\.stream"):
        hybrid.connect().stream()
    cluster = hybrid.connect(configure(tmp_path))
    stream = cluster.stream()
    cluster.distribute(Net(stream))
    batch = next(cluster.batches(stream))
    with pytest.raises(RuntimeError, match="stream"):
        next(cluster.batches([batch]))
    cluster = hybrid.connect(configure(tmp_path))
    cluster.distribute(Net(stream))
    cluster.resume(tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"before cluster\.resume"):
        cluster.stream()


def test_stream_scales_numbers_as_a_loaded_model_does(tmp_path: Path) -> None:
    numbers = []
    for name, num_rows in (("before", 100), ("now", 7)):
        root = tmp_path / name
        write_day(root, 1, num_rows, files=1)
        cluster = hybrid.connect(configure(root, batch_size=200))
        stream = cluster.stream()
        cluster.distribute(Net(stream))
        if name == "now":
            cluster.load(tmp_path / "model")
        numbers.append(next(cluster.batches(stream))["dense"][:, 1].min().item())
        if name == "before":
            cluster.save(tmp_path / "model")
    assert numbers[0] == pytest.approx(numbers[1])


def test_end_before_until_is_an_error_after_the_last_checkpoint(tmp_path: Path) -> None:
    write_day(tmp_path, 1)
    late = f"files(lanes = 4, until = '{tmp_path}/log/day=2')"
    with pytest.raises(DataError, match=r"day=2.* data\.stream"):
        train(tmp_path, stream=late)
    write_day(tmp_path, 2)
    steps, _ = train(tmp_path, stream=late)
    assert [*steps] == [*range(7, 14)]


@pytest.mark.filterwarnings("ignore:.* the script that wrote the checkpoint began with")
def test_checkpoint_without_a_position_is_refused(tmp_path: Path) -> None:
    write_day(tmp_path, 1)
    stream = hybrid.connect(configure(tmp_path)).stream()
    cluster = hybrid.connect(configure(tmp_path))
    model = cluster.distribute(Net(stream))
    cluster.save(step_folder(tmp_path / "run", 0), torch.optim.Adam(model.parameters()))
    with pytest.raises(CheckpointError, match="stream"):
        train(tmp_path)

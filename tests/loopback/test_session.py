"""A session whose roles are all this process: what the master sees of work that is still on its way."""

import functools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cluster import small_config
from torch import Tensor
from torch.testing import assert_close

from hybrid.batch import Batch, SparseFeatures
from hybrid.checkpoint.checkpoint_manifest import shard_file
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.custom_loop.embedding_modules import Jagged
from hybrid.custom_loop.prepared_batches import features_of
from hybrid.data.encode.feature_encoder import FeatureEncoder
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.inference.trained_module import TrainedModule, load
from hybrid.inference.trained_run import TrainedRun
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.protocol.ticket import Ticket
from hybrid.topology import MASTER, Role, Topology
from workers.controller.session import Session
from workers.model_commands.prediction_commands import predict

pytestmark = pytest.mark.usefixtures("loopback")

STEPS, SIZE, ROWS = 4, 5, 6
INPUT = InputSpec(("x",), (FeatureSpec("ids", ROWS),))
ON_THEIR_WAY_SECONDS = 0.2


class Here(Topology):
    """A trainer and a worker, both of them the master's own process."""

    @property
    def trainers(self) -> tuple[Role, ...]:
        return (MASTER,)

    @property
    def workers(self) -> tuple[Role, ...]:
        return (MASTER,)


def make_batches(trainer: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(trainer)
    return [
        Batch(
            torch.randn(SIZE, 1, generator=generator),
            SparseFeatures(torch.randint(0, ROWS, (SIZE,), generator=generator), None, None, 1),
            torch.randint(0, 2, (SIZE,), generator=generator).float(),
            SIZE,
        )
        for _ in range(STEPS)
    ]


@contextmanager
def opened(mode: str, spec: InputSpec = INPUT, **sections: dict[str, Any]) -> Iterator[Session]:
    config = small_config(cluster={"trainers": 1, "workers": 1}, train={"update": mode}, **sections)
    session = Session(Here(1, 1), config, spec, STEPS)
    try:
        yield session
    finally:
        session.close()


def let_the_last_gradients_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    receive: Callable[..., None] = TableShards.receive

    @functools.wraps(receive)  # calls name a method by its own name
    def receive_late(tables: TableShards, ticket: Ticket, *args: Any, **options: Any) -> None:
        if ticket.step == STEPS - 1:
            time.sleep(ON_THEIR_WAY_SECONDS)
        receive(tables, ticket, *args, **options)

    monkeypatch.setattr(TableShards, "receive", receive_late)


def saved_rows(mode: str, folder: Path) -> dict[str, Tensor]:
    """What a checkpoint of all steps has of the table, taken as soon as the trainer has computed them."""
    with opened(mode) as session:
        session.train_on(make_batches, 0)
        saving = session.begin_save(folder, STEPS, 0)
        assert saving.is_copied
        saving.write()
    return Checkpoint.open(folder).tensors(shard_file("ids", 0, 1))


@pytest.mark.parametrize("mode", ["pipelined", "async"])
def test_a_checkpoint_has_the_gradients_that_are_still_on_their_way(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = saved_rows(mode, tmp_path / "in time")
    let_the_last_gradients_be_slow(monkeypatch)
    assert_close(saved_rows(mode, tmp_path / "late"), expected, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["pipelined", "async"])
def test_a_profile_has_the_updates_that_are_still_on_their_way(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_the_last_gradients_be_slow(monkeypatch)
    with opened(mode, profile={"steps": (1, STEPS - 1)}) as session:
        session.train_on(make_batches, 0)
        profile = session.take_profile()
        spans = [placed.span.name for of_role in profile.placed.values() for placed in of_role]
        assert spans.count("apply") == 1


# What no feature says: that of those with bags the ids of one will have weights.
BAGS = InputSpec(
    ("x",), (FeatureSpec("ids", ROWS), FeatureSpec("tags", 4, multi_hot=True), FeatureSpec("seen", 5, True))
)


def weighted_batches(trainer: int) -> list[Batch]:
    draw = random.Random(trainer)
    batches = []
    for batch in make_batches(trainer):
        bags = [
            [[draw.randrange(each.num_rows) for _ in range(1 + each.multi_hot)] for _ in range(SIZE)]
            for each in BAGS.sparse_features
        ]
        weights = [
            [[draw.random() + 0.2 if each.name == "tags" else 1.0 for _ in bag] for bag in of_feature]
            for each, of_feature in zip(BAGS.sparse_features, bags, strict=True)
        ]
        batches.append(batch._replace(sparse_features=SparseFeatures.from_bags(bags, weights)))
    return batches


def test_weights_of_ids_are_in_what_is_saved(tmp_path: Path) -> None:
    """Of the feature that had some, though its columns were not announced to: in files, and in exports."""
    with opened("sync", BAGS, data={"multi_hot_separator": "|"}) as session:
        session.train_on(weighted_batches, 0)
        session.save(tmp_path / "saved", STEPS, 0)
    model = load(tmp_path / "saved")
    assert isinstance(model, TrainedModule)
    names = ["dense", "ids", "tags", "tags.weights", "tags.offsets", "seen", "seen.offsets"]
    assert list(model.input_names) == names
    batch = weighted_batches(7)[0]
    given = features_of(batch, model.trained.encoder.input_spec)
    trained = TrainedRun.read(tmp_path / "saved", print)
    ours = TrainedModule(trained, in_memory=False).predict(batch).outputs.double()
    found = model(given)["probability"].double()
    assert_close(found, ours.sigmoid(), rtol=0, atol=1e-6)
    given["tags.weights"] = Jagged(torch.ones(2 * SIZE), given["tags"].offsets)
    assert (model(given)["probability"] - found).abs().max() > 1e-3
    check_file(tmp_path, batch, ours.sigmoid())


def check_file(folder: Path, batch: Batch, expected_B: Tensor) -> None:
    """See that predict reads the weights of a file, and gives what is expected."""
    ids, tags, seen = batch.sparse_features.ids_L.split([SIZE, 2 * SIZE, 2 * SIZE])
    assert batch.sparse_features.weights_L is not None
    weights = batch.sparse_features.weights_L[SIZE : 3 * SIZE].tolist()
    texts = [f"{tag}:{weight}" for tag, weight in zip(tags.tolist(), weights, strict=True)]
    lines = ["x,ids,tags,seen"]
    for b, x in enumerate(batch.dense_features[:, 0].tolist()):
        lines.append(f"{x},{ids[b]},{'|'.join(texts[2 * b : 2 * b + 2])},{seen[2 * b]}|{seen[2 * b + 1]}")
    (folder / "new.csv").write_text("\n".join(lines) + "\n")
    predict(folder / "saved", [str(folder / "new.csv")], folder / "p.csv")
    rows = (folder / "p.csv").read_text().splitlines()[1:]
    assert [float(row.split(",")[1]) for row in rows] == pytest.approx(expected_B.tolist(), abs=1e-6)


def test_weights_that_were_there_before_stay(tmp_path: Path) -> None:
    """Of a model that goes on with batches that have none."""
    with opened("sync", BAGS) as session:
        session.train_on(weighted_batches, 0)
        session.save(tmp_path / "saved", STEPS, 0)
    with opened("sync", BAGS) as session:
        session.load(Checkpoint.open(tmp_path / "saved"))
        session.save(tmp_path / "again", STEPS, 0)
    sparse = FeatureEncoder.load(tmp_path / "again").sparse
    assert {each.name for each in sparse if each.weighted} == {"tags"}

"""Items that are drawn in each step: their distribution, and what the draws of a step depend on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hybrid
from hybrid.errors import DataError

NUM_ITEMS, NUMBER, STEPS = 10, 4, 6
LOG_Q = torch.tensor([4.0, 2.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 5.0, 1.0]).log()
DATA = {"item": torch.arange(4 * STEPS) % NUM_ITEMS}
Draws = list[tuple[int, list[int]]]  # the step and the negatives of each micro-batch


class Net(nn.Module):
    """The scores of the sample's item with the drawn items."""

    def __init__(self) -> None:
        super().__init__()
        self.table = hybrid.Embedding(40, 2, ids=["item", "negative"], optimizer=hybrid.SGD(lr=0.1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        scores: Tensor = self.table(batch["item"]) @ self.table(batch["negative"]).mT
        return scores.sum(1)


def train(
    folder: Path,
    data: Any = DATA,
    train: str = "",
    seed: int = 0,
    *,
    stop: int = -1,
    number: int = NUMBER,
    log_q: Tensor = LOG_Q,
    name: str = "negative",
) -> Draws:
    """Run a script, which ends after step ``stop``; return the negatives of each micro-batch, with its step.

    Args:
        data: the samples, or "prepared".
        train: keys of section [train].
    """
    (folder / "items.csv").write_text("label,item\n" + "".join(f"{i % 2},{i}\n" for i in range(30)))
    (folder / "config.toml").write_text(
        f'[run]\nseed = {seed}\n[train]\nbatch_size = 4\n{train}\n[data]\nformat = "csv"\nsparse = ["item"]\n'
        f'path = ["{folder}/items.csv"]\nsplit = "random(0.2)"\ncache_folder = "{folder}/cache"\n'
    )
    cluster = hybrid.connect(folder / "config.toml")
    model = cluster.distribute(Net())
    found = []
    cluster.resume(folder / "run", every_steps=2)
    samples, size = (cluster.prepare("train")[0], None) if data == "prepared" else (data, 4)
    for _ in cluster.epochs(2):
        for batch in cluster.batches(samples, size, negatives={name: hybrid.Negatives(number, log_q)}):
            assert torch.equal(batch["negative.log_q"], log_q[batch["negative"]])
            found.append((cluster.step, batch["negative"].tolist()))
            cluster.backward(model(batch))
            if len(found) == stop:
                raise SystemExit
    return found


@pytest.fixture
def expected(tmp_path: Path) -> Draws:
    (tmp_path / "plain").mkdir()
    found = train(tmp_path / "plain")
    assert [step for step, _ in found] == [*range(2 * STEPS)]
    assert len({tuple(ids) for _, ids in found}) > STEPS  # steps, and epochs, have different draws
    return found


@pytest.mark.parametrize(
    ("data", "keys"),
    [(DATA, 'update = "lookahead"'), (DATA, "micro_batches = 2"), ("prepared", "")],
    ids=["lookahead", "micro-batches", "prepared data"],
)
def test_draws_depend_on_the_step_only(data: Any, keys: str, tmp_path: Path, expected: Draws) -> None:
    found = train(tmp_path, data, keys)
    assert len(found) > STEPS
    of_parts = [each for each in expected for _ in range(1 + ("micro" in keys))]
    assert all(one == other for one, other in zip(found, of_parts, strict=False))


@pytest.mark.parametrize("update", ["sync", "lookahead"])
def test_a_restarted_script_draws_the_same_items(update: str, tmp_path: Path, expected: Draws) -> None:
    keys = f'update = "{update}"'
    with pytest.raises(SystemExit):
        train(tmp_path, train=keys, stop=6)
    assert train(tmp_path, train=keys) == expected[4:]


def test_another_seed_draws_other_items(tmp_path: Path, expected: Draws) -> None:
    assert train(tmp_path, seed=1) != expected


@pytest.mark.parametrize("log_q", [LOG_Q, torch.zeros(NUM_ITEMS)], ids=["popularity", "uniform"])
def test_items_are_drawn_by_their_probability(log_q: Tensor) -> None:
    num_draws, negatives = 6_000, {"negative": hybrid.Negatives(NUM_ITEMS, log_q)}
    cluster = hybrid.connect()
    cluster.distribute(Net())
    samples = {"sample": torch.arange(num_draws // NUM_ITEMS)}
    with torch.no_grad():
        ids = torch.cat([batch["negative"] for batch in cluster.batches(samples, 1, negatives=negatives)])
    found = torch.bincount(ids, minlength=NUM_ITEMS) / num_draws
    probability = log_q.softmax(dim=0)
    deviation = (probability * (1 - probability) / num_draws).sqrt()
    assert ((found - probability).abs() <= 4 * deviation).all()  # 0 for items that are never drawn


@pytest.mark.parametrize(
    ("number", "log_q", "message"),
    [
        (11, LOG_Q, r"number .*10.* 11"),
        (0, LOG_Q, r"number .* 0"),
        (1, LOG_Q.view(2, 5), "log_q"),
        (1, torch.zeros(0), "log_q"),
        (1, torch.tensor([0.0, torch.nan]), "log_q"),
        (1, torch.tensor([0.0, torch.inf]), "log_q"),
        (1, torch.full((2,), -torch.inf), "log_q"),
    ],
)
def test_wrong_numbers_and_distributions_are_errors(number: int, log_q: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hybrid.Negatives(number, log_q)


@pytest.mark.parametrize(
    ("data", "name"),
    [(DATA | {"negative": DATA["item"]}, "negative"), (DATA["item"], "item"), (DATA, "item")],
)
def test_drawn_columns_need_a_dict_without_them(data: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"'{name}'"):
        train(tmp_path, data, name=name)


def test_an_evaluation_needs_no_columns_that_it_does_not_use() -> None:
    cluster = hybrid.connect()
    model = cluster.distribute(Net())
    with torch.no_grad():
        (found,) = (model.table(batch["item"]) for batch in cluster.batches(DATA))
        assert torch.equal(found, model.table(DATA["item"]))
    with pytest.raises(DataError, match="'negative'"):
        next(cluster.batches(DATA))

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hybrid
from hybrid.custom_loop.local_batches import Slicing, size_of
from hybrid.errors import CheckpointError, ConfigError, DataError

ROWS = [f"{i % 2},{i},u{i % 5},{'|'.join('ab'[: i % 3])}\n" for i in range(60)]
TABLE = "label,price,user,tags\n" + "".join(ROWS)


def config_of(folder: Path, sparse: str = '["user", "tags"]', table: str = TABLE) -> Path:
    (folder / "clicks.csv").write_text(table)
    file = folder / "config.toml"
    file.write_text(
        f'[data]\nformat = "csv"\npath = ["{folder}/clicks.csv"]\nlabel = "label"\ndense = ["price"]\n'
        f'sparse = {sparse}\nmulti_hot_separator = "|"\nsplit = "random(0.2)"\n'
        f'cache_folder = "{folder}/cache"\n'
        "[train]\nbatch_size = 16\n"
    )
    return file


def test_slices_of_all_trainers_are_all_samples(tmp_path: Path) -> None:
    train, test = hybrid.connect(config_of(tmp_path)).prepare()
    assert len(train) + len(test) == 60
    assert set(train.num_rows) == {"user", "tags"}
    assert train.dense_columns == ("price",)
    whole = list(test.slices(Slicing(100)))
    assert [each.global_size for each in whole] == [len(test)]
    assert set(whole[0].values) == {"label", "dense", "user", "tags"}
    parts = [list(test.slices(Slicing(5, trainer=trainer, num_trainers=3))) for trainer in range(3)]
    assert {len(part) for part in parts} == {-(-len(test) // 5)}
    for step in zip(*parts, strict=True):
        assert sum(each.size for each in step) == step[0].global_size
        assert all(size_of(each.values) == each.size for each in step)
    steps = list(zip(*parts, strict=True))
    for name in ("label", "dense", "user"):
        joined = torch.cat([each.values[name] for step in steps for each in step])
        assert torch.equal(joined, whole[0].values[name])
    tags = [each.values["tags"] for step in steps for each in step]
    assert torch.equal(torch.cat([each.values for each in tags]), whole[0].values["tags"].values)
    assert torch.equal(torch.cat([each.lengths for each in tags]), whole[0].values["tags"].lengths)


def test_each_pass_has_another_order(tmp_path: Path) -> None:
    train, _ = hybrid.connect(config_of(tmp_path)).prepare()
    passes = [
        torch.cat([each.values["dense"] for each in train.slices(Slicing(), epoch)]) for epoch in range(2)
    ]
    assert not torch.equal(*passes)
    assert torch.equal(*(each.sort(dim=0).values for each in passes))


TASKS = '[tasks.click]\nlabel = "label"\n[tasks.cost]\nlabel = "price"\ntype = "regression"\nmask = "label"\n'


def test_batch_has_labels_weights_and_groups(tmp_path: Path) -> None:
    file = config_of(tmp_path)
    text = file.read_text().replace('dense = ["price"]', 'group = "user"')
    file.write_text(text + TASKS)
    cluster = hybrid.connect(file)
    train, _ = cluster.prepare()
    (whole,) = train.slices(Slicing(100))
    values = whole.values
    assert {"click", "cost", "click.weights", "cost.weights", "group", "dense", "user", "tags"} == set(values)
    assert torch.equal(values["click"], values["cost"] % 2)
    assert torch.equal(values["cost.weights"], values["click"])
    assert values["click.weights"].tolist() == [1.0] * len(train)
    assert len(values["group"].unique()) == len(values["user"].unique()) == 5
    file.write_text(text + TASKS.replace("tasks.cost", "tasks.user"))
    with pytest.raises(ConfigError, match=r"data\.sparse"):
        hybrid.connect(file).prepare()


def test_groups_of_prepared_data_stay_whole(tmp_path: Path) -> None:
    file = config_of(tmp_path)
    file.write_text(file.read_text().replace('dense = ["price"]', 'group = "user"'))
    train, test = hybrid.connect(file).prepare()
    parts = [list(train.slices(Slicing(15, "group", False, trainer, 3))) for trainer in range(3)]
    whole = list(train.slices(Slicing(15, "group")))
    assert sum(each.size for each in whole) == len(train)
    for step, alone in zip(zip(*parts, strict=True), whole, strict=True):
        groups = [each.values["group"] for each in step]
        assert all(len(each) for each in groups)
        own = [each[: local.size] for each, local in zip(groups, step, strict=True)]
        assert torch.equal(torch.cat(own), alone.values["group"])
        assert sum(len(each.unique()) for each in own) == len(alone.values["group"].unique())
    with pytest.raises(DataError, match=r"whole = 'user' .* data\.group"):
        list(train.slices(Slicing(15, "user")))
    with pytest.raises(DataError, match="groups"):
        list(test.slices(Slicing(15, "group")))
    with pytest.raises(DataError, match="batch of 5"):
        list(train.slices(Slicing(5, "group")))


def test_prepared_batches_have_weights_of_ids(tmp_path: Path) -> None:
    rows = [f"{i % 2},{i},u{i % 5},{'|'.join(f'{t}:{i}' for t in 'ab'[: i % 3])}\n" for i in range(60)]
    file = config_of(tmp_path, table="label,price,user,tags\n" + "".join(rows))
    with file.open("a") as more:
        more.write('[columns.tags]\nkind = "weighted"\n[columns.price]\nnumeric_scaling = "none"\n')
    train, _ = hybrid.connect(file).prepare()
    (local,) = train.slices(Slicing(100))
    whole = local.values
    assert set(whole) == {"label", "dense", "user", "tags", "tags.weights"}
    tags, weights = whole["tags"], whole["tags.weights"]
    assert torch.equal(tags.offsets, weights.offsets)
    assert torch.equal(tags.lengths, whole["dense"].view(-1).long() % 3)
    assert torch.equal(weights.values, whole["dense"].view(-1).repeat_interleave(tags.lengths))


class Outputs(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.user = hybrid.Embedding(rows, 2, ids="user")

    def forward(self, batch: dict[str, Any]) -> Tensor:
        outputs: Tensor = 9 * self.user(batch["user"]) + batch["price"].unsqueeze(1) / 60
        return outputs


def test_evaluate_has_the_metrics_of_all_tasks(tmp_path: Path) -> None:
    file = config_of(tmp_path)
    file.write_text(file.read_text().replace('dense = ["price"]', 'group = "user"') + TASKS)
    cluster = hybrid.connect(file)
    model = cluster.distribute(Outputs(9))
    samples = {"user": torch.arange(40) % 9, "price": torch.arange(40.0) % 7, "group": torch.arange(40) % 3}
    samples |= {"click": (torch.arange(40) % 2).float(), "cost": torch.rand(40)}
    samples["cost.weights"] = (torch.arange(40) % 4 > 0).float()
    found = cluster.evaluate(samples, size=12)
    with torch.no_grad():
        logits, costs = model(samples).unbind(1)
    loss = binary_cross_entropy_with_logits(logits, samples["click"])
    error = (costs - samples["cost"])[samples["cost.weights"] > 0].square().mean().sqrt()
    assert found["click.log_loss"] == pytest.approx(loss.item())
    assert found["cost.rmse"] == pytest.approx(error.item())
    with pytest.raises(DataError, match="'click'"):
        cluster.evaluate({"user": samples["user"], "price": samples["price"]})
    with pytest.raises(DataError, match="no batch"):
        cluster.evaluate([])


def test_rows_of_other_values_are_not_loaded(tmp_path: Path) -> None:
    """With another vocabulary, each user would get the vector of another user."""
    for folder, table in (("before", TABLE), ("now", TABLE.replace("u4", "a4"))):
        (tmp_path / folder).mkdir()
        cluster = hybrid.connect(config_of(tmp_path / folder, table=table))
        data, _ = cluster.prepare()
        cluster.distribute(Outputs(data.num_rows["user"]))
        if table == TABLE:
            cluster.save(tmp_path / "saved")
            cluster.load(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/saved: .* values"):
        cluster.load(tmp_path / "saved")

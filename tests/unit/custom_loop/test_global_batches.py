"""Batches of a custom loop, from user code or prepared data, and the slices of trainers."""

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hybrid
from hybrid.custom_loop.local_batches import Slicing, checksum, cut, global_batches, size_of, slice_batches
from hybrid.errors import CheckpointError, ConfigError, DataError

CONSTANTS = {"mask": None, "epoch": 3, "rate": torch.tensor(0.5), "about": ("x", {"name": "text"}, True)}


class Pair(NamedTuple):
    ids: Tensor
    tags: hybrid.Jagged


def whole(size: int = 10) -> dict[str, Any]:
    tags = hybrid.Jagged.of([[i] * (i % 3) for i in range(size)])
    return {
        "pair": Pair(torch.arange(size), tags),
        "rest": [torch.rand(size, 2)],
        "name": [str(i) for i in range(size)],
        "title": tuple(str(i) for i in range(size)),
        **CONSTANTS,
    }


def flat(batches: list[dict[str, Any]]) -> tuple[list[int], list[int], list[str]]:
    """Ids, tags, and names of all batches."""
    ids = [i for batch in batches for i in batch["pair"].ids.tolist()]
    tags = [i for batch in batches for i in batch["pair"].tags.values.tolist()]
    return ids, tags, [name for batch in batches for name in batch["name"]]


def test_cut_keeps_the_structure_of_a_batch() -> None:
    part = cut(whole(), 4, 6)
    assert size_of(part) == 2
    assert part["pair"].tags.offsets.tolist() == [0, 1, 3]
    assert part["pair"].tags.values.tolist() == [4, 5, 5]
    assert (part["name"], part["title"]) == (["4", "5"], ("4", "5"))
    of_batch = [
        each.values for each in next(slice_batches([whole()], Slicing(trainer=1, num_trainers=2))).split(3)
    ]
    for values in (part, *of_batch, *global_batches([whole(), whole()], Slicing(8))):
        assert values | CONSTANTS == values


@pytest.mark.parametrize("size", [1, 3, 4, 10, 99])
def test_rebatching_gives_batches_of_one_size(size: int) -> None:
    of_all = whole()
    pieces = [cut(of_all, 0, 4), cut(of_all, 4, 5), cut(of_all, 5, 10)]
    for data in (of_all, pieces):
        found = list(global_batches(data, Slicing(size)))
        assert [size_of(each) for each in found[:-1]] == [size] * (len(found) - 1)
        assert flat(found) == flat([of_all])
        complete = list(global_batches(data, Slicing(size, drop_last=True)))
        assert flat(complete) == flat(found[: 10 // size])
    assert [size_of(each) for each in global_batches(pieces, Slicing())] == [4, 1, 5]


def test_trainers_take_contiguous_slices() -> None:
    batches = list(global_batches(whole(), Slicing(8)))
    taken = [list(slice_batches(batches, Slicing(trainer=trainer, num_trainers=3))) for trainer in range(3)]
    assert [[each.size for each in of] for of in taken] == [[3, 1], [3, 1], [2, 0]]
    assert [each.global_size for each in taken[2]] == [8, 2]
    assert flat([of[0].values for of in taken]) == flat(batches[:1])


sizes_of_groups = st.lists(st.integers(1, 5), min_size=1, max_size=15)


def of_groups(sizes: list[int]) -> dict[str, Any]:
    return {**whole(sum(sizes)), "user": torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) % 9}


@settings(deadline=None)
@given(sizes_of_groups, st.integers(5, 9), st.data())
def test_batches_and_slices_keep_groups_whole(sizes: list[int], size: int, data: st.DataObject) -> None:
    of_all, total = of_groups(sizes), sum(sizes)
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=4))})
    pieces = [cut(of_all, start, stop) for start, stop in pairwise(cuts)]
    found = list(global_batches(of_all, Slicing(size, "user")))
    assert flat(found) == flat([of_all])
    assert [flat([each]) for each in global_batches(pieces, Slicing(size, "user"))] == [
        flat([each]) for each in found
    ]
    ends = list(accumulate(sizes))
    for number in range(len(found)):
        last = [end for end in ends if number * size < end <= (number + 1) * size]
        assert sum(map(size_of, found[: number + 1])) == last[-1]
    if len(sizes) < 9:
        taken = [list(slice_batches(found, Slicing(None, "user", False, trainer, 3))) for trainer in range(3)]
        for parts, batch in zip(zip(*taken, strict=True), found, strict=True):
            assert all(size_of(part.values) >= min(1, size_of(batch)) for part in parts)
            cuts_of_parts = [cut(part.values, 0, part.size) for part in parts]
            assert flat(cuts_of_parts) == flat([batch])
            micro = [each for part in parts for each in part.split(2)]
            assert flat([cut(each.values, 0, each.size) for each in micro]) == flat([batch])
            users = [set(cut(each.values, 0, each.size)["user"].tolist()) for each in micro]
            assert sum(map(len, users)) == len(set().union(*users))
            assert {part.global_size for part in parts} == {size_of(batch)}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": torch.zeros(3)}, "whole = 'user'"),
        ({"user": torch.zeros(3, 2)}, "whole = 'user'"),
        ([torch.zeros(3)], "whole = 'user'"),
        ({"user": torch.tensor([4, 5, 4])}, "group 4 of 'user'"),
    ],
)
def test_split_groups_are_refused(batch: Any, message: str) -> None:
    for num_trainers in (1, 2):
        with pytest.raises(DataError, match=message):
            list(slice_batches([batch], Slicing(None, "user", False, 0, num_trainers)))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_group_larger_than_a_batch_is_refused(size: int) -> None:
    of_all = of_groups([2, 5, 1])
    for data in (of_all, [cut(of_all, start, start + 1) for start in range(8)]):
        with pytest.raises(DataError, match=r"group [01] "):
            list(global_batches(data, Slicing(size, "user")))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{"a": torch.zeros(3), "b": [torch.zeros(4)]}], r"'a': 3, 'b\[0\]': 4\).*hybrid\.Jagged"),
        ([{}], "no tensors"),
        ([{"a": 7, "b": torch.tensor(7)}], "no tensors"),
        ([{"a": torch.zeros(1), "b": {7}}], "a set at 'b'"),
        ([{"a": torch.zeros(1), "b": each} for each in (None, 3)], "None and 3 at 'b'"),
        (3, "int"),
        ([{"a": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.zeros(1)}], "structures"),
    ],
)
def test_invalid_batches_are_refused(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(slice_batches(global_batches(data, Slicing(2)), Slicing(num_trainers=2)))


def test_checksum_covers_every_tensor() -> None:
    first, second = whole(), whole()
    second["rest"] = first["rest"]
    assert checksum(first, 0) == checksum(second, 0)
    second["pair"].tags.values[0] += 1
    assert checksum(first, 0) != checksum(second, 0)
    in_turn = [checksum(first, number) != checksum(second, number) for number in range(1, 5)]
    assert sum(in_turn) == 1, "four tensors, of which each later batch compares one"
    assert checksum({"text": ["a", "b"]}, 1) == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
def test_checksum_of_a_long_tensor_covers_values_and_order(dtype: torch.dtype) -> None:
    values = (torch.arange(1_000_003) % 251).to(dtype)
    assert checksum([values], 0) == checksum([values.clone()], 0)
    assert checksum([values], 0) != checksum([values.roll(1)], 0)
    for position in (0, 500_001, len(values) - 1):
        other = values.clone()
        other[position] += 1
        assert checksum([values], 0) != checksum([other], 0), position


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

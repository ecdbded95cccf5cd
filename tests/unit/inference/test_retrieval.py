"""A trained model with a retrieval task: metrics over all items, the best items, and vectors for an index."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support.choices import NUM_ITEMS, choices_config, write_choices
from support.trained import texts_of, write_trained
from torch import Tensor

import hybrid
from hybrid.errors import ConfigError
from workers.cli.model_commands import evaluate, export_run, predict

ALL_ITEMS = [f"i{number}" for number in range(NUM_ITEMS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run ``run`` and of new rows ``new.csv``; read-only."""
    folder = tmp_path_factory.mktemp("retrieval")
    columns = {"columns.tags": {"kind": "weighted"}}
    write_trained(folder / "run", choices_config(folder, data={"split": "none"}, **columns))
    with write_choices(folder / "new.csv", 60, seed=2).open("a") as file:
        file.write("u1,2.0,a:1,unknown,1,1.0\n")
    return folder


def vectors(folder: Path, kind: str, **columns: list[str]) -> Tensor:
    """Return the vectors of the module of the run for some rows."""
    model = hybrid.load(folder / "run")
    with torch.no_grad():
        values: Tensor = model(model.encode(columns))[f"{kind}_vector"]
    return values


def item_vectors(folder: Path) -> Tensor:
    users = {"user": ["u1"] * NUM_ITEMS, "limit": ["1"] * NUM_ITEMS, "tags": [""] * NUM_ITEMS}
    return vectors(folder, "item", item=ALL_ITEMS, **users)


def scores(folder: Path, rows: dict[str, list[str]]) -> Tensor:
    """Return the scores of all items for the users of ``rows``."""
    columns = {name: rows[name] for name in ("user", "limit", "tags", "item")}
    return vectors(folder, "user", **columns) @ item_vectors(folder).mT


def test_metrics_rank_the_chosen_item_among_all_items(folder: Path) -> None:
    rows = texts_of(folder / "new.csv")
    ranks = []
    for row_I, item, label in zip(scores(folder, rows), rows["item"], rows["chosen"], strict=True):
        if label == "1":
            own = row_I[ALL_ITEMS.index(item)] if item in ALL_ITEMS else torch.nan
            ranks.append(float((row_I > own).sum()) if item in ALL_ITEMS else np.inf)
    metrics = evaluate(folder / "run", [str(folder / "new.csv")])["metrics"]
    assert metrics == pytest.approx(
        {
            "mrr": np.mean([1 / (1 + rank) for rank in ranks]),
            "num_samples": len(ranks),
            "recall@5": np.mean([rank < 5 for rank in ranks]),
            "ndcg@5": np.mean([1 / np.log2(2 + rank) if rank < 5 else 0 for rank in ranks]),
        }
    )


@pytest.mark.parametrize(
    ("scale", "recall", "mrr"), [("1e-30", 0, 1 / (1 + (NUM_ITEMS - 1) / 2)), ("3e38", np.nan, np.nan)]
)
def test_net_that_ranks_no_item_is_not_best(scale: str, recall: float, mrr: float, tmp_path: Path) -> None:
    """Equal scores have the metrics of a random order; scores that are not numbers have none."""
    config = choices_config(tmp_path, **{"tables.item": {"init": f"uniform({scale})"}})
    metrics = evaluate(write_trained(tmp_path / "run", config), [])["metrics"]
    assert [metrics["recall@5"], metrics["mrr"]] == pytest.approx([recall, mrr], nan_ok=True)


@pytest.mark.parametrize("name", ["top.csv", "top.parquet"])
def test_top_k_are_the_items_with_the_highest_scores(name: str, folder: Path, tmp_path: Path) -> None:
    predict(folder / "run", [str(folder / "new.csv")], tmp_path / name, ["user"], top_k=4)
    best = scores(folder, rows := texts_of(folder / "new.csv")).topk(4, dim=1)
    if name.endswith("csv"):
        found: dict[str, list[Any]] = dict(texts_of(tmp_path / name))
        found |= {key: [each.split("|") for each in found[key]] for key in ("items", "scores")}
    else:
        found = pq.read_table(tmp_path / name).to_pydict()
    assert list(found) == ["row", "user", "items", "scores"]
    assert found["user"] == rows["user"]
    assert found["items"] == [[ALL_ITEMS[i] for i in row] for row in best.indices.tolist()]
    assert np.array(found["scores"], np.float64) == pytest.approx(best.values.numpy(), abs=1e-6)


def test_search_needs_no_item_column(folder: Path, tmp_path: Path) -> None:
    rows = [line.split(",") for line in (folder / "new.csv").read_text().splitlines()]
    (tmp_path / "users.csv").write_text("".join(",".join(row[:3]) + "\n" for row in rows))
    for name, new in (("with", folder / "new.csv"), ("without", tmp_path / "users.csv")):
        predict(folder / "run", [str(new)], tmp_path / name, ["user"], top_k=4)
    assert (tmp_path / "with").read_text() == (tmp_path / "without").read_text()
    with pytest.raises(ConfigError, match=r"^data\.sparse = 'item'"):
        predict(folder / "run", [str(tmp_path / "users.csv")], tmp_path / "scores")
    with pytest.raises(ConfigError, match=r"^--keep = 'item'"):
        predict(folder / "run", [str(tmp_path / "users.csv")], tmp_path / "scores", ["item"], top_k=4)


def test_exported_items_are_the_vectors_of_all_items(folder: Path, tmp_path: Path) -> None:
    export_run(folder / "run", tmp_path / "export", ["items"], None)
    table = pq.read_table(tmp_path / "export/items.parquet")
    order = [ALL_ITEMS.index(name) for name in table["item"].to_pylist()]
    assert sorted(order) == list(range(NUM_ITEMS))
    assert torch.allclose(torch.tensor(table["vector"].to_pylist()), item_vectors(folder)[order], atol=1e-6)


def test_prediction_is_the_score_of_the_item(folder: Path, tmp_path: Path) -> None:
    predict(folder / "run", [str(folder / "new.csv")], tmp_path / "p.csv")
    rows = texts_of(folder / "new.csv")
    known = [index for index, item in enumerate(rows["item"]) if item in ALL_ITEMS]
    own = [ALL_ITEMS.index(rows["item"][index]) for index in known]
    found = [float(row["score"]) for row in csv.DictReader((tmp_path / "p.csv").read_text().splitlines())]
    expected = scores(folder, rows)[known, own]
    assert np.array(found)[known] == pytest.approx(expected.numpy(), abs=1e-6)


@pytest.mark.parametrize("k", [0, NUM_ITEMS + 1])
def test_a_k_beyond_the_items_is_refused(k: int, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^--top-k = {k}: .*{NUM_ITEMS}"):
        predict(folder / "run", [str(folder / "new.csv")], tmp_path / "p.csv", top_k=k)


def test_other_tasks_have_no_items(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--top-k: .*retrieval"):
        predict(run, [], tmp_path / "p.csv", top_k=3)
    with pytest.raises(ConfigError, match=r"^--format items: .*retrieval"):
        export_run(run, tmp_path / "export", ["items"], None)


def test_hashed_items_have_metrics_but_no_names(tmp_path: Path) -> None:
    config = choices_config(tmp_path, **{"columns.item": {"vocabulary": "hash(40)"}})
    run = write_trained(tmp_path / "run", config)
    assert evaluate(run, [])["metrics"]["num_samples"] > 0
    with pytest.raises(ConfigError, match=r"^--top-k.*: .*vocabulary"):
        predict(run, [], tmp_path / "p.csv", top_k=3)


def test_a_vocabulary_without_items_is_refused(tmp_path: Path) -> None:
    config = choices_config(tmp_path, data={"vocabulary": "build(min_count = 999)"})
    with pytest.raises(ConfigError, match=r"^tasks\.choice\.type = 'item': .*min_count"):
        evaluate(write_trained(tmp_path / "run", config), [])

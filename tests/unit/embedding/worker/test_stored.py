"""Tables in the files of a checkpoint answer as the same tables in memory do."""

import dataclasses
import json
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from support.shards import RULES, cluster, evaluate, specs, train

from hybrid.checkpoint.checkpoint_files import shard_file
from hybrid.checkpoint.checkpoint_manifest import Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.embedding.bags import Bags, Item
from hybrid.embedding.placement import Placement, place
from hybrid.embedding.table_spec import Pooling, TableSpec
from hybrid.embedding.worker.checkpoint_tables import StoredTables
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.errors import CheckpointError, ClusterError


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def tables() -> list[TableSpec]:
    """Some of the same width, and so of one group, and one of another."""
    narrow, wide = specs("row"), specs("row", dim=5)
    return [*narrow, dataclasses.replace(wide[2], name="w", features=("w",))]


def whole(of: list[TableSpec]) -> Placement:
    return place([dataclasses.replace(table, placement="table") for table in of], 1)


def items(placement: Placement) -> list[Item]:
    generator = torch.Generator().manual_seed(1)
    asked: list[Item] = []
    for number, group in enumerate(placement.groups(0)):
        ids_L = torch.randint(0, group.num_rows, (40,), generator=generator, dtype=torch.int32)
        offsets = torch.tensor([0, 0, 7, 8, 31, 40], dtype=torch.int32)
        asked += [(number, Bags(ids_L)), (number, Bags(ids_L[:0]))]
        asked += [(number, Bags(ids_L, offsets, pooling=pooling)) for pooling in Pooling]
        asked.append((number, Bags(ids_L, offsets, torch.rand(40, generator=generator))))
    return asked


@pytest.mark.parametrize("num_workers", [1, 3])
def test_they_answer_as_tables_in_memory_do_bit_for_bit(
    stack: ExitStack, tmp_path: Path, num_workers: int
) -> None:
    saved = cluster(stack, tables(), num_workers)
    saved.train(0, 3)
    stored = Checkpoint.open(saved.save(tmp_path / "step-3", 3))
    placement = whole(tables())
    in_memory = TableShards(placement, 0, RULES)
    stack.callback(in_memory.close)
    in_memory.load(stored.folder, 3)
    expected = in_memory.lookup(evaluate(3), items(placement)).wait()
    answered = StoredTables(placement, stored, torch.float32).lookup(evaluate(3), items(placement)).wait()
    assert len(answered) == len(expected) == 12
    for ours, theirs in zip(answered, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.any() or not len(ours)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"dim": 4}, "table a has another shape than the model's"),
        ({"num_rows": 12}, "table a has another shape than the model's"),
        ({"name": "other"}, "holds no table other; it is of another model"),
    ],
)
def test_a_checkpoint_of_other_tables_is_refused(
    stack: ExitStack, tmp_path: Path, table: dict[str, int | str], message: str
) -> None:
    stored = Checkpoint.open(cluster(stack, specs(), 2).save(tmp_path / "step-0", 0))
    changed = [dataclasses.replace(specs()[0], **table), *specs()[1:]]  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=message):
        StoredTables(whole(changed), stored, torch.float32)


def test_they_take_no_gradients(stack: ExitStack, tmp_path: Path) -> None:
    stored = Checkpoint.open(cluster(stack, specs(), 1).save(tmp_path / "step-0", 0))
    each = StoredTables(whole(specs()), stored, torch.float32)
    with pytest.raises(ClusterError, match="take no gradients"):
        each.send_gradients(train(0), [])
    with pytest.raises(ClusterError, match="take no gradients"):
        each.exchange(train(0), [], train(1), [])


def test_a_table_larger_than_memory_is_read_row_by_row(tmp_path: Path) -> None:
    """The file is all holes but for a row; the system would not map it for writing."""
    num_bytes = 2 * (psutil.virtual_memory().total + psutil.swap_memory().total)
    num_rows = num_bytes // 2 // 256
    for shard in range(2):
        entry = {"dtype": "F32", "shape": [num_rows, 64], "data_offsets": [0, num_rows * 256]}
        header = json.dumps({"weight": entry}).encode()
        path = tmp_path / shard_file("t", shard, 2)
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.seek((num_rows - 3) * 256, 1)
            file.write(np.full(64, 10.0 + shard, np.float32).tobytes())
            file.truncate(8 + len(header) + num_rows * 256)
    table = dataclasses.replace(specs(dim=64)[0], name="t", features=("t",), num_rows=2 * num_rows)
    stored = Checkpoint(tmp_path, Manifest(1, 1, {"t": (2 * num_rows, 64, 2)}, {}))
    each = StoredTables(whole([table]), stored, torch.float32)
    ids_L = torch.tensor([2 * num_rows - 5, 0, 2 * num_rows - 6, 2 * num_rows - 1])
    (pooled_BD,) = each.lookup(evaluate(1), [(0, Bags(ids_L))]).wait()
    assert pooled_BD[:, 7].tolist() == [11.0, 0.0, 10.0, 0.0]

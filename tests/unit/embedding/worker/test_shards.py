"""Tables of a worker: saved, and loaded by another number of workers."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.shards import PATIENCE_SECONDS, cluster, prefetch, shard_tensors, specs, train
from torch import Tensor

from hybrid.checkpoint.checkpoint_folders import shard_file
from hybrid.config.table_sections import TABLE_OPTIMIZERS
from hybrid.embedding.bags import Bags
from hybrid.embedding.table_spec import TableSpec
from hybrid.errors import CheckpointError, ClusterError


def assert_same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype == torch.float32
        assert torch.equal(tensor.view(torch.int32), second[name].view(torch.int32)), name


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "optimizer"),
    [
        (("table", 1), ("row", 3), "adam"),
        (("row", 2), ("table", 1), "adam"),
        (("table", 3), ("row", 2), "rowwise_adagrad"),
        (("row", 3), ("row", 3), "adam"),
        (("row", 8), ("row", 5), "adam"),  # more workers than table b has rows
        *((("row", 3), ("row", 2), name) for name in TABLE_OPTIMIZERS.names),
    ],
)
def test_other_number_of_workers_resumes_bit_for_bit(
    stack: ExitStack, tmp_path: Path, saved_by: tuple[str, int], loaded_by: tuple[str, int], optimizer: str
) -> None:
    first = cluster(stack, specs(saved_by[0], optimizer), saved_by[1])
    first.train(0, 4)
    folder = first.save(tmp_path / "step-4", 4)
    second = cluster(stack, specs(loaded_by[0], optimizer), loaded_by[1], seed=8)
    second.load(folder, 4)
    assert_same_bits(second.whole(), first.whole())
    first.train(4, 3)
    second.train(4, 3)
    assert_same_bits(second.whole(), first.whole())


def test_save_waits_for_the_running_update(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last backward pass returns before its update is applied; a checkpoint must have the update."""
    (host,) = cluster(stack, specs(optimizer="sgd"), 1).hosts.values()
    shard = host.groups[0].group.shards[0]
    before = host.groups[0].shard_tensors(shard)["weight"].clone()
    optimizer = host.groups[0].optimizer
    apply = optimizer.apply
    has_begun, may_end = threading.Event(), threading.Event()

    def slow_apply(*arguments: Any) -> float:
        has_begun.set()
        assert may_end.wait(PATIENCE_SECONDS)
        return apply(*arguments)

    monkeypatch.setattr(optimizer, "apply", slow_apply)
    host.contribute(train(0), [(0, Bags(torch.tensor([1])))], [torch.ones(1, 3)])
    assert has_begun.wait(PATIENCE_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(host.begin_save, False)
        wait([saving], timeout=0.02)  # an end to this would be too soon
        may_end.set()
        saving.result(PATIENCE_SECONDS)
    host.write(tmp_path)
    saved = load_file(tmp_path / shard_file("a", 0, 1))["weight"]
    torch.testing.assert_close(saved[1], before[1] - 0.1)


def test_load_drops_pending_prefetches(stack: ExitStack, tmp_path: Path) -> None:
    each = cluster(stack, specs(), 1)
    (host,) = each.hosts.values()
    folder = each.save(tmp_path / "step-0", 0)
    host.lookup(prefetch(0), [(0, Bags(torch.tensor([2])))]).wait()
    each.load(folder, 0)
    with pytest.raises(ClusterError, match="step 0"):
        host.send_gradients(prefetch(0), [torch.ones(1, 3)])


@pytest.mark.parametrize(
    "tables",
    [
        specs(dim=4),
        specs(optimizer="sgd"),
        specs(optimizer="rowwise_adagrad"),
        [dataclasses.replace(specs()[0], num_rows=12)],
        [dataclasses.replace(specs()[0], name="z", features=("z",))],
    ],
    ids=["dim", "no state", "other state", "more rows", "other table"],
)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_checkpoint_of_other_tables_is_refused(
    stack: ExitStack, tmp_path: Path, tables: list[TableSpec], num_workers: int
) -> None:
    folder = cluster(stack, specs("row"), 2).save(tmp_path / "step-0", 0)
    other = cluster(stack, tables, num_workers)
    with pytest.raises(CheckpointError, match=rf"^{folder}\b.*table \w"):
        other.load(folder, 0)


@pytest.mark.parametrize("optimizer", TABLE_OPTIMIZERS.names)
def test_planned_bytes_equal_those_of_the_tensors(stack: ExitStack, optimizer: str) -> None:
    each = cluster(stack, specs("row", optimizer), 2)
    for shard in each.placement.shards:
        tensors = shard_tensors(each.hosts[shard.worker], shard).values()
        assert sum(t.numel() * t.element_size() for t in tensors) == shard.num_bytes

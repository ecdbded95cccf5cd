"""Pre-update rows: saved, and read by the lookup that must not see the last update."""

import dataclasses
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from support.shards import PATIENCE_SECONDS, Cluster, cluster, evaluate, specs
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.checkpoint.checkpoint_folders import pre_update_file
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.embedding.bags import Bags
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.errors import CheckpointError
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.protocol.update_rules import Staleness, UpdateMode, UpdateRules

RULES = UpdateRules(1, UpdateMode.PIPELINED, timeout_seconds=PATIENCE_SECONDS)
POOLED = {"sum": Pooling.SUM, "mean": Pooling.MEAN, "max": Pooling.MAX}
CUT = 3  # number of steps before the checkpoint
SIZE = 6


def tables(placement: str, whole: Collection[str] = ()) -> list[TableSpec]:
    """Return tables of one id per sample in a placement, and whole tables whose ids are pooled.

    Args:
        whole: names of the tables of which each step updates all rows.
    """
    pooled = [
        TableSpec(name, 9, 3, pooling, (name,), OptimizerSpec("adam", 0.1), 1.0, "table")
        for name, pooling in POOLED.items()
    ]
    wide = dataclasses.replace(specs(placement, dim=5)[2], name="wide", features=("wide",))
    spec = OptimizerSpec("adam", 0.1, weight_decay=0.1, all_rows=True)
    return [
        dataclasses.replace(each, optimizer=spec) if each.name in whole else each
        for each in (*specs(placement), wide, *pooled)
    ]


def pipelined(stack: ExitStack, placement: str, workers: int, whole: Collection[str] = ()) -> Cluster:
    return cluster(stack, tables(placement, whole), workers, rules=RULES, multi_hot=list(POOLED))


def ids(each: Cluster, step: int) -> SparseFeatures:
    generator = torch.Generator().manual_seed(step)

    def bag(feature_rows: int, size: int) -> list[int]:
        return torch.randint(0, feature_rows, (size,), generator=generator).tolist()

    bags = [[bag(f.num_rows, b % 4 if f.multi_hot else 1) for b in range(SIZE)] for f in each.features]
    return SparseFeatures.from_bags(bags)


def prefetch(step: int) -> Ticket:
    return Ticket(0, step, max(0, step - 1), purpose=Purpose.PREFETCH)


def train_ahead(each: Cluster, steps: range, last: int = -1) -> dict[int, Tensor]:
    """Train with lookups a step ahead, and return the vectors of each step."""
    lookups = {step: each.embeddings.lookup(ids(each, step), prefetch(step)) for step in steps[:1]}
    vectors = {}
    for step in steps:
        lookups[step + 1] = each.embeddings.lookup(ids(each, step + 1), prefetch(step + 1))
        lookups[step].has_successor = True
        lookups[step].is_last_before_checkpoint = step == last
        vectors[step] = pooled_BE = lookups[step].wait()
        generator = torch.Generator().manual_seed(100 + step)
        pooled_BE.backward(torch.randn(pooled_BE.shape, generator=generator))
        each.drain()
    return vectors


def bits(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: tensor.view(torch.int32).flatten().tolist() for name, tensor in tensors.items()}


def staleness(each: Cluster) -> set[Staleness]:
    return {host.barrier.take_staleness() for host in each.hosts.values()}


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        (("row", 3), ("row", 3)),
        (("row", 3), ("row", 2)),
        (("row", 2), ("table", 1)),
        (("table", 1), ("row", 3)),
        (("row", 8), ("row", 5)),  # more workers than some tables have rows
    ],
)
@pytest.mark.parametrize("whole", [(), ("a", "wide", "max")], ids=["touched", "all of some"])
def test_resumed_run_has_the_bits_of_an_undisturbed_run(
    stack: ExitStack,
    tmp_path: Path,
    saved_by: tuple[str, int],
    loaded_by: tuple[str, int],
    whole: Collection[str],
) -> None:
    first, same, second = (pipelined(stack, *by, whole) for by in (saved_by, saved_by, loaded_by))
    expected = train_ahead(first, range(CUT + 3))
    train_ahead(same, range(CUT), last=CUT - 1)
    second.load(same.save(tmp_path / "step", CUT), CUT)
    staleness(second)
    vectors = train_ahead(second, range(CUT, CUT + 3))
    for step, pooled_BE in vectors.items():
        assert torch.equal(pooled_BE, expected[step])
    assert bits(second.whole()) == bits(first.whole())
    assert staleness(second) == {Staleness(3, 3, 1)}


def test_only_the_last_step_before_a_checkpoint_keeps_pre_update_rows(
    stack: ExitStack, tmp_path: Path
) -> None:
    for name, last, expected in (("1", CUT - 1, 2), ("2", CUT - 2, 0)):
        each = pipelined(stack, "row", 2)
        train_ahead(each, range(CUT), last=last)
        assert len(Checkpoint.open(each.save(tmp_path / name, CUT)).pre_update_rows()) == expected


@pytest.mark.parametrize("is_stored", [False, True], ids=["at once", "through a checkpoint"])
def test_skipped_step_counts_as_an_update_without_change(
    stack: ExitStack, tmp_path: Path, is_stored: bool
) -> None:
    each = cluster(stack, specs()[:1], 1, 7, dataclasses.replace(RULES, check_finite=False))
    (host,) = each.hosts.values()
    before = each.whole()["a.weight"]
    host.lookup(prefetch(0), [(0, Bags(torch.tensor([2])))]).wait()
    host.receive(prefetch(0)._replace(is_last_before_checkpoint=True), [torch.full((1, 3), torch.nan)])
    host.barrier.decide(0, None)
    each.drain()
    if is_stored:
        each.load(each.save(tmp_path / "step", 1), 1)
    staleness(each)
    (rows_UD,) = host.lookup(prefetch(1), [(0, Bags(torch.arange(11)))]).wait()
    assert torch.equal(rows_UD, before)
    host.receive(prefetch(1), [torch.ones(11, 3)])
    host.barrier.decide(1, 1.0)
    each.drain()
    assert staleness(each) == {Staleness(1, 1, 1)}


@pytest.mark.parametrize("mode", [UpdateMode.SYNC, UpdateMode.ASYNC])
def test_other_modes_ignore_pre_update_rows(stack: ExitStack, tmp_path: Path, mode: UpdateMode) -> None:
    first = pipelined(stack, "row", 2)
    train_ahead(first, range(CUT), last=CUT - 1)
    folder = first.save(tmp_path / "first", CUT)
    rules = dataclasses.replace(RULES, mode=mode)
    second = cluster(stack, tables("row"), 2, 7, rules, multi_hot=list(POOLED))
    second.load(folder, CUT)
    now, ours = (
        e.embeddings.lookup(ids(e, CUT), ticket).wait()
        for e, ticket in ((first, evaluate(CUT)), (second, prefetch(CUT)))
    )
    assert torch.equal(now, ours)
    assert Checkpoint.open(second.save(tmp_path / "second", CUT)).pre_update_rows() == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows.a": torch.tensor([1]), "weight.a": torch.zeros(1, 4)},
        {"rows.a": torch.tensor([1]), "weight.a": torch.zeros(2, 3)},
        {"rows.a": torch.tensor([1])},
        {"rows.a": torch.tensor([1.0]), "weight.a": torch.zeros(1, 3)},
        {"rows.a": torch.tensor([[1]]), "weight.a": torch.zeros(1, 1, 3)},
    ],
    ids=["width", "number", "no values", "type", "shape"],
)
def test_invalid_pre_update_rows_are_refused(
    stack: ExitStack, tmp_path: Path, wrong: dict[str, Tensor]
) -> None:
    each = pipelined(stack, "row", 1)
    folder = each.save(tmp_path / "step", CUT)
    manifest = Checkpoint.open(folder).manifest
    files = manifest.files | write_tensors(folder, pre_update_file(0), wrong)
    dataclasses.replace(manifest, files=files).write(folder)
    with pytest.raises(CheckpointError, match=r"earlier\.0.*table a"):
        each.load(folder, CUT)


def test_pre_update_rows_out_of_range_are_ignored(stack: ExitStack, tmp_path: Path) -> None:
    each = pipelined(stack, "row", 1)
    folder = each.save(tmp_path / "step", CUT)
    manifest = Checkpoint.open(folder).manifest
    # In the group they would be rows of the tables before and after it.
    beyond = {"rows.b": torch.tensor([-1, 4, 5]), "weight.b": torch.full((3, 3), torch.nan)}
    files = manifest.files | write_tensors(folder, pre_update_file(0), beyond | {"rows.other": torch.ones(1)})
    dataclasses.replace(manifest, files=files).write(folder)
    each.load(folder, CUT)
    (host,) = each.hosts.values()
    items = [(n, Bags(torch.arange(g.group.num_rows))) for n, g in enumerate(host.groups)]
    for (n, _), vectors in zip(items, host.forward(prefetch(CUT), items), strict=True):
        assert torch.equal(vectors, host.groups[n].weight_RD)

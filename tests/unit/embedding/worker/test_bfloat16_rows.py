"""Rows in bfloat16, whose updates are rounded at random by known hashes; vectors sent as bfloat16."""

import dataclasses
import struct
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.samples import features_of_bags
from support.shards import NUM_ROWS, RULES, Cluster, cluster, evaluate, specs, train
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.config.table_sections import TABLE_OPTIMIZERS
from hybrid.embedding.bags import Bags
from hybrid.embedding.placement import place
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.reference.reference_rows import initial_state, round_stochastically, update_rows
from hybrid.updates.ticket import Purpose, Ticket

BFLOAT16, SEED, DIM = torch.bfloat16, 7, 6
ROWS = Bags(torch.tensor([1, 2]))
LARGEST = torch.finfo(BFLOAT16).max


def table_of(num_rows: int, optimizer: str = "sgd", **settings: Any) -> TableSpec:
    """Return table "t" with rows of zeros and a learning rate of 1."""
    spec = OptimizerSpec(optimizer, 1.0, **settings)
    return TableSpec("t", num_rows, DIM, Pooling.SUM, ("t",), spec, 1.0, init="zeros", has_bfloat16_rows=True)


def hosted(stack: ExitStack, table: TableSpec, dtype: torch.dtype = torch.float32) -> TableShards:
    rules = dataclasses.replace(RULES, check_finite=False)
    host = TableShards(place([table], 1), 0, rules, dtype)
    stack.callback(host.close)
    host.initialize(SEED)
    return host


def update(host: TableShards, step: int, rows: Tensor, grad_UD: Tensor) -> Tensor:
    """Update rows with gradients, and return the table as stored."""
    host.contribute(train(step), [(0, Bags(rows))], [grad_UD])
    host.barrier.set_scale(step, 1.0)
    host.lookup(evaluate(step + 1), []).wait()
    return host.groups[0].weight_RD


def float_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


# Bits of float32 between two neighbors in bfloat16, among them denormal numbers and the smallest normal one.
BETWEEN = [0x3F808000, 0xBF80FFFF, 0x3F800001, 0x00000001, 0x807F8000, 0x007FFFFF, 0x42FE4321]
# Values that stay, or have no neighbor above.
FIXED = [1.0, -2.5, float_of(0x00010000), torch.inf, -torch.inf, LARGEST, -LARGEST]


def test_values_between_neighbors_have_the_bits_of_the_reference(stack: ExitStack) -> None:
    rows, step = torch.arange(5, 45), 3
    host = hosted(stack, table_of(50))
    for before in range(step):  # updates that round nothing
        update(host, before, rows, torch.zeros(len(rows), DIM))
    bits_UD = torch.tensor(BETWEEN).repeat(len(rows))[: len(rows) * DIM].to(torch.int32).view(-1, DIM)
    values_UD = bits_UD.view(torch.float32)
    stored = update(host, step, rows, -values_UD)[5:45].view(torch.int16)
    expected = round_stochastically(values_UD, rows, SEED, step, "t").view(torch.int16)
    assert torch.equal(stored, expected)
    assert 60 < (stored != (bits_UD >> 16).to(torch.int16)).sum() < 180


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_of_bfloat16_stay_and_finite_values_stay_finite(stack: ExitStack, dtype: torch.dtype) -> None:
    host = hosted(stack, table_of(13), dtype)
    host.groups[0].weight_RD.fill_(-0.0)
    given = [*FIXED, 0.0, -0.0, float_of(0x7F7FFFFF), -float_of(0x7F7FFFFF), torch.nan, float_of(0x7F800001)]
    grad_UD = -torch.tensor(given, dtype=dtype).unsqueeze(1).expand(-1, DIM)
    stored = update(host, 0, torch.arange(13), grad_UD)
    assert stored[11:].isnan().all()
    expected = torch.tensor([*FIXED, 0.0, -0.0, LARGEST, -LARGEST], dtype=BFLOAT16)
    assert torch.equal(stored[:11].view(torch.int16), expected.view(torch.int16).unsqueeze(1).expand(-1, DIM))


@pytest.mark.parametrize("all_rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TABLE_OPTIMIZERS.names)
def test_bits_equal_the_reference(stack: ExitStack, name: str, dtype: torch.dtype, all_rows: bool) -> None:
    """State is not rounded."""
    if all_rows and "all_rows" not in TABLE_OPTIMIZERS.parse("", name).arguments:
        return
    table = table_of(11, name, eps=1e-3, momentum=0.7, weight_decay=0.01, ftrl_l1=0.01, all_rows=all_rows)
    table = dataclasses.replace(table, bytes_per_value=dtype.itemsize)
    host, draw = hosted(stack, table, dtype), torch.Generator().manual_seed(1)
    (group,) = host.groups
    (shard,) = group.group.shards
    assert shard.num_bytes == sum(tensor.nbytes for tensor in group.shard_tensors(shard).values())
    group.weight_RD.copy_(torch.randn(11, DIM, generator=draw))
    expected_RD = group.weight_RD.clone()
    state = initial_state(table.optimizer, expected_RD.to(dtype))
    for step in range(8):
        rows = torch.randperm(11, generator=draw)[:4].sort().values
        grad_UD = torch.randn(4, DIM, generator=draw).to(dtype)
        update(host, step, rows, grad_UD.clone())

        def rounded(rows_UD: Tensor, ids_U: Tensor, step: int = step) -> Tensor:
            return round_stochastically(rows_UD, ids_U, SEED, step, "t")

        update_rows(table.optimizer, 1.0, expected_RD, state, rows, grad_UD, rounded)
        if name != "ftrl":  # which the reference computes by other formulas
            assert torch.equal(group.weight_RD, expected_RD)
    assert (group.weight_RD - expected_RD).abs().max() < 0.05
    assert all(tensor.dtype is dtype for tensor in group.optimizer.state.values())


def clusters_of(stack: ExitStack, optimizer: str, num_workers: int, **changes: Any) -> Cluster:
    tables = [
        dataclasses.replace(each, **{"has_bfloat16_rows": each.name != "b"} | changes)
        for each in specs("row", optimizer, DIM)
    ]
    return cluster(stack, tables, num_workers, SEED)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_bits_ignore_workers_and_restarts(stack: ExitStack, tmp_path: Path, optimizer: str) -> None:
    """One table is in float32, in the same messages."""
    one, three, resumed = (clusters_of(stack, optimizer, workers) for workers in (1, 3, 2))
    one.train(0, 4)
    resumed.load(one.save(tmp_path / "step-4", 4), 4)
    one.train(4, 5)
    resumed.train(4, 5)
    three.train(0, 9)
    expected = one.whole()
    assert {name: rows.dtype for name, rows in expected.items() if name.endswith("weight")} == {
        f"{name}.weight": torch.float32 if name == "b" else BFLOAT16 for name in NUM_ROWS
    }
    for other in (three, resumed):
        assert all(torch.equal(rows, expected[name]) for name, rows in other.whole().items())


@pytest.mark.parametrize("is_wide", [True, False], ids=["from float32", "to float32"])
def test_a_checkpoint_of_another_type_is_converted(stack: ExitStack, tmp_path: Path, is_wide: bool) -> None:
    """Values are rounded to the nearest, as initial rows are."""
    types = {"has_bfloat16_rows": not is_wide}, {"has_bfloat16_rows": is_wide}
    source, target = (clusters_of(stack, "adam", workers, **types[workers - 1]) for workers in (1, 2))
    for name, rows in source.whole().items():
        assert torch.equal(rows.to(BFLOAT16), target.whole()[name].to(BFLOAT16))
    source.train(0, 3)
    target.load(source.save(tmp_path / "step-3", 3), 3)
    for name, rows in source.whole().items():
        is_row = name.endswith("weight")
        assert torch.equal(target.whole()[name], rows.to(BFLOAT16 if is_wide and is_row else torch.float32))


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.PREFETCH])
def test_rows_are_sent_in_two_bytes_and_their_gradients_in_full(stack: ExitStack, purpose: Purpose) -> None:
    each = clusters_of(stack, "adagrad", 1)
    before = {name: rows_RD.float() for name, rows_RD in each.whole().items()}
    ids = {"a": [1, 10], "b": [2, 3], "c": [22, 4]}
    sparse = SparseFeatures(torch.tensor([*ids.values()]).flatten(), None, None, 3)
    pooled_BE = each.embeddings.lookup(sparse, Ticket(0, 0, 0, purpose=purpose)).wait()
    assert torch.equal(pooled_BE, torch.cat([before[f"{name}.weight"][ids[name]] for name in ids], dim=1))
    grad_BE = torch.randn(pooled_BE.shape, generator=torch.Generator().manual_seed(3))
    pooled_BE.backward(grad_BE)
    each.drain()
    for name, grad_BD in zip(ids, grad_BE.split(DIM, dim=1), strict=True):
        assert torch.equal(each.whole()[f"{name}.sum"][ids[name]], grad_BD.square())
    (host,) = each.hosts.values()
    number = next(i for i, group in enumerate(host.groups) if group.group.has_bfloat16_rows)
    (response,) = host.lookup(Ticket(0, 1, 1, purpose=purpose), [(number, ROWS)]).wait()[:1]
    assert response.itemsize == 2


RATE, NUM_IDS, SIZE = 0.05, 40, 16


def wired(stack: ExitStack, dtype: torch.dtype, pooled_by: str = "workers") -> Cluster:
    """Return a table of one id and a table of bags on a worker that sends bfloat16."""
    of_sgd = (OptimizerSpec("sgd", RATE), 1.0)
    tables = [
        TableSpec(name, NUM_IDS, DIM, Pooling.SUM, (name,), *of_sgd, pooled_by=pooled_by)
        for name in ("one", "bags")
    ]
    kind = partial(TableShards, wire_dtype=BFLOAT16)
    return cluster(stack, tables, 1, dtype=dtype, multi_hot=["bags"], kind=kind)


@pytest.fixture
def arriving(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Gradients as they reach the worker."""
    arrived: list[Tensor] = []
    contribute = TableShards.contribute

    def spy(tables: TableShards, ticket: Ticket, items: Any, grads: Any, *more: Any, **keys: Any) -> None:
        arrived.extend(grads)
        contribute(tables, ticket, items, grads, *more, **keys)

    monkeypatch.setattr(TableShards, "contribute", spy)
    return arrived


def rounded(values: Tensor) -> Tensor:
    return values.to(BFLOAT16).float()


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.PREFETCH])
@pytest.mark.parametrize("pooled_by", ["workers", "trainers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_and_gradients_are_rounded_on_the_way_and_rows_are_not(
    stack: ExitStack, dtype: torch.dtype, pooled_by: str, purpose: Purpose, arriving: list[Tensor]
) -> None:
    """Where trainers pool, the vectors that are sent are rows, and the gradients those of rows."""
    each = wired(stack, dtype, pooled_by)
    draw = torch.Generator().manual_seed(3)
    one_B, bags_B3 = (torch.randint(0, NUM_IDS, shape, generator=draw) for shape in ((SIZE,), (SIZE, 3)))
    before = each.whole()
    sparse = features_of_bags([one_B.unsqueeze(1).tolist(), bags_B3.tolist()])
    pooled_BE = each.embeddings.lookup(sparse, Ticket(0, 0, 0, purpose=purpose)).wait()
    vectors_BD = rounded(before["bags.weight"][bags_B3].sum(1))
    if pooled_by == "trainers":
        vectors_BD = rounded(before["bags.weight"][bags_B3]).sum(1)
    assert torch.equal(pooled_BE, torch.cat([rounded(before["one.weight"][one_B]), vectors_BD], dim=1))

    grad_B1 = torch.randn(SIZE, 1, generator=draw)
    pooled_BE.backward(grad_B1.expand_as(pooled_BE))
    each.drain()
    assert {grad.dtype for grad in arriving} == {BFLOAT16}
    one_RD = rounded(torch.zeros(NUM_IDS, DIM).index_add(0, one_B, grad_B1.expand(-1, DIM))).to(dtype)
    each_LD = grad_B1.repeat_interleave(3, 0).expand(-1, DIM)
    if pooled_by == "trainers":
        bags_RD = rounded(torch.zeros(NUM_IDS, DIM).index_add(0, bags_B3.flatten(), each_LD)).to(dtype)
    else:
        zeros_RD = torch.zeros(NUM_IDS, DIM, dtype=dtype)
        bags_RD = zeros_RD.index_add(0, bags_B3.flatten(), rounded(each_LD).to(dtype))
    for name, step_RD in (("one.weight", one_RD), ("bags.weight", bags_RD)):
        after_RD = each.whole()[name]
        assert after_RD.dtype == dtype
        torch.testing.assert_close(before[name] - after_RD, RATE * step_RD)
        assert not torch.equal(after_RD, after_RD.to(BFLOAT16).to(dtype))


@pytest.mark.parametrize(
    ("purpose", "expected"),
    [(Purpose.TRAIN, BFLOAT16), (Purpose.PREFETCH, BFLOAT16), (Purpose.PREDICT, torch.float32)],
)
def test_the_answer_of_a_worker_is_of_half_the_bytes_in_training_only(
    stack: ExitStack, purpose: Purpose, expected: torch.dtype
) -> None:
    (host,) = wired(stack, torch.float32).hosts.values()
    (vectors_BD,) = host.lookup(Ticket(0, 0, 0, purpose=purpose), [(0, ROWS)]).wait()
    assert vectors_BD.dtype == expected

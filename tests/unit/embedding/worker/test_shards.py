"""Tables of a worker: saved, loaded by another number of workers, and updated; buffers of large responses."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.shards import (
    NUM_ROWS,
    PATIENCE_SECONDS,
    RULES,
    cluster,
    evaluate,
    hosting,
    prefetch,
    shard_tensors,
    shards_of,
    specs,
    train,
)
from torch import Tensor

from hybrid.batch import SparseFeatures
from hybrid.checkpoint.checkpoint_folders import shard_file
from hybrid.config.table_sections import TABLE_OPTIMIZERS
from hybrid.embedding.bags import Bags
from hybrid.embedding.placement import place
from hybrid.embedding.table_source import LookupRequest
from hybrid.embedding.table_spec import OptimizerSpec, TableSpec
from hybrid.embedding.worker.table_groups import ReusedBuffers
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.errors import CheckpointError, ClusterError, NonFiniteError
from hybrid.reference.reference_rows import initial_state, update_rows
from hybrid.updates.update_rules import UpdateMode, UpdateRules


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


def test_save_waits_for_updates(stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


class TestDecided:
    def test_norm_of_large_gradients_does_not_overflow(self) -> None:
        with hosting(UpdateRules(1, check_finite=False)) as host:
            large = torch.full((2, 2), 1e30)  # its square overflows float32
            host.contribute(train(0), [(0, Bags(torch.tensor([1, 2])))], [large])
            assert host.barrier.squared_norm(0).wait() == pytest.approx(4e60)
            host.barrier.set_scale(0, None)

    def test_norm_of_a_non_finite_gradient_names_the_row(self) -> None:
        with hosting(UpdateRules(1, clip_norm=1.0)) as host:
            bad = torch.tensor([[1.0, torch.nan]])
            host.contribute(train(0), [(0, Bags(torch.tensor([5])))], [bad])
            with pytest.raises(NonFiniteError, match=r"^step 0: .* table t, row 5,"):
                host.barrier.squared_norm(0).wait()

    def test_the_norm_covers_all_groups(self) -> None:
        """Tables of different widths are in different groups."""
        tables = [*specs(), dataclasses.replace(specs(dim=5)[0], name="w", features=("w",))]
        rules = dataclasses.replace(RULES, check_finite=False)
        with closing(TableShards(place(tables, 1), 0, rules)) as host:
            host.initialize(7)
            assert len(host.groups) == 2
            items = [(group, Bags(torch.tensor([1, 1]))) for group in range(2)]
            host.contribute(train(0), items, [torch.ones(2, 3), torch.ones(2, 5)])
            assert host.barrier.squared_norm(0).wait() == pytest.approx(4 * 3 + 4 * 5)
            host.barrier.set_scale(0, None)
            host.barrier.drain()


@pytest.mark.parametrize("scale", [None, 0.3], ids=["at once", "decided"])
@pytest.mark.parametrize(
    ("optimizer", "weight_decay", "all_rows"),
    [("adam", 0.1, False), ("adam", 0.1, True), ("sgd", 0.0, False), ("sgd", 0.1, False), ("sgd", 0.1, True)],
)
def test_update_of_several_blocks_equals_the_reference(
    scale: float | None, optimizer: str, weight_decay: float, all_rows: bool
) -> None:
    num_rows = 2**19  # of 16 bytes with gradient, and more with state
    rules = UpdateRules(1, check_finite=scale is None)
    with hosting(rules, optimizer, num_rows, weight_decay=weight_decay, all_rows=all_rows) as host:
        (group,) = host.groups
        assert len(list(group.blocks(num_rows))) > 2
        expected_RD = group.weight_RD.clone()
        spec = group.group.optimizer
        rows_U = torch.arange(0, num_rows, 3)
        grad_UD = torch.randn(len(rows_U), 2, generator=torch.Generator().manual_seed(3))
        host.contribute(train(0), [(0, Bags(rows_U))], [grad_UD])
        if scale is not None:
            host.barrier.set_scale(0, scale)
        host.barrier.drain()
        state = initial_state(spec, expected_RD)
        update_rows(spec, 1.0, expected_RD, state, rows_U, grad_UD * (scale or 1.0))
        assert torch.equal(group.weight_RD, expected_RD)


@pytest.mark.parametrize("parts", [[], [(0, Bags(torch.empty(0, dtype=torch.int64)))]])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_all_rows_decay_in_a_step_without_ids(parts: list[tuple[int, Bags]], clip_norm: float | None) -> None:
    with hosting(UpdateRules(1, clip_norm=clip_norm), weight_decay=0.5, all_rows=True) as host:
        rows = host.groups[0].weight_RD
        before = rows.clone()
        host.contribute(train(0), parts, [torch.empty(0, 2)] * len(parts))
        if clip_norm is not None:
            assert host.barrier.squared_norm(0).wait() == 0.0
            host.barrier.set_scale(0, 1.0)
        host.barrier.drain()
        torch.testing.assert_close(rows, before * 0.5)


def test_split_with_untouched_shards_updates_all_rows_to_the_same_bits(stack: ExitStack) -> None:
    """On eight workers, two steps of five ids do not touch every shard of 23 rows."""
    spec = OptimizerSpec("adam", 0.1, weight_decay=0.1, all_rows=True)
    split, whole = (
        cluster(stack, [dataclasses.replace(t, optimizer=spec) for t in specs(placement)], workers)
        for placement, workers in (("row", 8), ("table", 1))
    )
    before = whole.whole()
    for each in (split, whole):
        each.train(0, 2)
    tensors = whole.whole()
    for name, tensor in split.whole().items():
        assert torch.equal(tensor, tensors[name])
        assert not (tensor == before[name]).any()


class TestFiniteness:
    @pytest.mark.parametrize("placement", ["table", "row"])
    @pytest.mark.parametrize(("name", "row"), [("a", 0), ("b", 0), ("b", 3), ("c", 0), ("c", 22)])
    def test_non_finite_gradients_raise(self, stack: ExitStack, placement: str, name: str, row: int) -> None:
        each = cluster(stack, specs(placement), 3)
        number = list(NUM_ROWS).index(name)
        ids = SparseFeatures(torch.tensor([1, 1, 1]).index_fill(0, torch.tensor(number), row), None, None, 3)
        pooled_BE = each.embeddings.lookup(ids, train(0)).wait()
        grad_BE = torch.ones_like(pooled_BE)
        grad_BE[0, 3 * number + 2] = torch.nan
        pooled_BE.backward(grad_BE)
        (holder,) = [s for s in shards_of(each.placement, name) if row % s.count == s.index]
        with pytest.raises(NonFiniteError, match=f"^step 0: .* table {name}, row {row},"):
            each.hosts[holder.worker].barrier.drain()

    def test_a_sum_that_overflows_is_no_error(self) -> None:
        with hosting(UpdateRules(1)) as host:
            huge = torch.full((2, 2), 3e38)
            host.contribute(train(0), [(0, Bags(torch.tensor([1, 2])))], [huge])
            host.barrier.drain()
            assert host.lookup(evaluate(1), []).done()


@pytest.mark.parametrize("offsets", [None, [0, 1, 2]])
@pytest.mark.parametrize("shape", [(1, 2), (3, 2), (2, 1), (2, 3), (4,)])
def test_gradients_of_a_wrong_shape_are_refused(offsets: list[int] | None, shape: tuple[int, ...]) -> None:
    bags = Bags(torch.tensor([1, 2]), None if offsets is None else torch.tensor(offsets))
    with hosting(UpdateRules(1)) as host:
        with pytest.raises(ClusterError, match=r"^trainer 0 .* 2 vectors of 2$"):
            host.contribute(train(0), [(0, bags)], [torch.ones(shape)])


@pytest.mark.parametrize("weighted", [0, 1])
def test_bags_with_and_without_weights_are_merged(weighted: int) -> None:
    """Bags of one trainer have weights."""
    with hosting(UpdateRules(2)) as host:
        before = host.groups[0].weight_RD.clone()
        for trainer in range(2):
            weights_L = torch.tensor([2.0, 3.0]) if trainer == weighted else None
            bags = Bags(torch.tensor([1, 4]), torch.tensor([0, 1, 2]), weights_L)
            host.contribute(train(0, trainer), [(0, bags)], [torch.ones(2, 2)])
        host.barrier.drain()
        moved_R = (before - host.groups[0].weight_RD)[:, 0]
        assert moved_R.tolist() == pytest.approx([0, 3, 0, 0, 4, 0])


class TestPrefetches:
    """Prefetched lookups, whose gradients arrive by a separate call."""

    def test_newest_lookup_gets_the_gradients_even_if_an_abandoned_one_runs_later(self) -> None:
        """A trainer that leaves its batches looks up others for the same step."""
        may_end, rules = threading.Event(), UpdateRules(2, UpdateMode.LOOKAHEAD)
        with hosting(rules) as host:
            before = host.groups[0].weight_RD.clone()

            def block() -> bool:
                return may_end.wait(PATIENCE_SECONDS)

            for trainer in range(2):
                host.lookup(prefetch(0, trainer), []).wait()
            small = host.barrier.run_when_ready(prefetch(1, 1, 1), lambda: None)
            for index in (2, 3):  # these take all threads of lookups
                host.barrier.run_when_ready(prefetch(1, 1, index), block, is_large=True)
            abandoned = host.lookup(prefetch(1), [(0, Bags(torch.ones(20_000, dtype=torch.int64)))])
            for trainer in range(2):
                host.send_gradients(prefetch(0, trainer), [])
            small.wait()
            assert not abandoned.done()
            host.lookup(prefetch(1), [(0, Bags(torch.tensor([4] * 20_000)))]).wait()
            may_end.set()
            abandoned.wait()
            host.lookup(prefetch(1, 1), []).wait()
            for trainer, grads in enumerate(([torch.ones(20_000, 2)], [])):
                host.send_gradients(prefetch(1, trainer), grads)
            host.barrier.drain()
            assert (before - host.groups[0].weight_RD)[:, 0].nonzero().tolist() == [[4]]

    def test_a_failure_of_gradients_fails_the_lookup_sent_with_them(self) -> None:
        items = [(0, Bags(torch.tensor([1])))]
        request = LookupRequest(prefetch(2), items)
        with hosting(UpdateRules(1, UpdateMode.LOOKAHEAD)) as host:
            for step in range(2):
                host.lookup(prefetch(step), items)
            response = host.send_gradients(prefetch(0), [torch.full((1, 2), torch.nan)], request)
            with pytest.raises(ClusterError, match=r"^trainer 0 .* step 0 twice"):
                host.send_gradients(prefetch(0), [torch.ones(1, 2)], request)
            with pytest.raises(NonFiniteError, match=r"^step 0: .* table t, row 1,"):
                response.wait()

    def test_distinct_rows_of_the_next_step_are_found_once(self) -> None:
        """They are found before the gradients arrive, in the order in which gradients are merged."""
        with hosting(UpdateRules(2, UpdateMode.LOOKAHEAD, micro_batches=2)) as host:
            host.record(range(1, 2))
            order = [(trainer, index) for trainer in (1, 0) for index in (0, 1)]
            items = [(0, Bags(torch.tensor([1, 4])))]
            for each in order:
                host.lookup(prefetch(0, *each), items)
            for step in range(2):
                for each in order:
                    later = LookupRequest(prefetch(step + 1, *each), items)
                    host.send_gradients(prefetch(step, *each), [torch.ones(2, 2)], later)
            assert [span.name for span in host.take_spans()].count("distinct rows") == 1

    def test_gradients_may_arrive_while_the_rows_of_their_step_are_collected(self) -> None:
        """The first comparison of two lookups of step 1 comes from the search for its distinct rows."""
        with hosting(UpdateRules(1, UpdateMode.LOOKAHEAD, micro_batches=2)) as host:
            before = host.groups[0].weight_RD.clone()
            arriving, has_arrived = [1], threading.Event()

            class Index(int):
                def __lt__(self, other: int) -> bool:
                    while arriving:
                        host.send_gradients(prefetch(1, index=arriving.pop()), [torch.ones(1, 2)])
                        has_arrived.set()
                    return super().__lt__(other)

            for ticket in (prefetch(step, index=Index(index)) for step in range(2) for index in range(2)):
                host.lookup(ticket, [(0, Bags(torch.tensor([ticket.lookup_index])))])
            for index in range(2):
                host.send_gradients(prefetch(0, index=index), [torch.ones(1, 2)])
            assert has_arrived.wait(PATIENCE_SECONDS)
            host.send_gradients(prefetch(1, index=0), [torch.ones(1, 2)])
            host.barrier.drain()
            assert (before - host.groups[0].weight_RD)[:3, 0].tolist() == pytest.approx([2.0, 2.0, 0.0])


LARGE = (1 << 20, 4)  # 16 MiB


def copy(buffers: ReusedBuffers, tensor: Tensor) -> Tensor:
    return buffers.empty(tensor.shape, tensor.dtype).copy_(tensor)


def test_a_buffer_is_reused_once_no_view_of_the_tensor_lives() -> None:
    buffers = ReusedBuffers()
    first = copy(buffers, torch.ones(LARGE))
    address, content = first.data_ptr(), first[7:9].numpy().data
    del first
    second = copy(buffers, torch.zeros(LARGE))
    assert second.data_ptr() != address
    assert bytes(content) == torch.ones(2, 4).numpy().tobytes()
    del content
    assert copy(buffers, torch.ones(8)).data_ptr() != address
    assert copy(buffers, torch.ones(LARGE[0] - 9, 4)).data_ptr() == address  # a similar size


def test_large_responses_reuse_memory_and_keep_their_values(stack: ExitStack) -> None:
    (host,) = cluster(stack, specs(), 1).hosts.values()
    rows_RD = host.groups[0].weight_RD

    def look_up(step: int, seed: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(len(rows_RD), (1_000_000,), generator=torch.Generator().manual_seed(seed))
        (vectors,) = host.lookup(prefetch(step), [(0, Bags(ids.int()))]).wait()
        return vectors, rows_RD[ids]

    first, expected = look_up(0, 0)
    address = first.data_ptr()
    second, _ = look_up(0, 1)
    assert second.data_ptr() != address
    assert torch.equal(first, expected)
    del first
    third, expected = look_up(0, 2)
    assert third.data_ptr() == address
    assert torch.equal(third, expected)

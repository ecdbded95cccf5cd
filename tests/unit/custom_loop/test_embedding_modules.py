"""Tables as modules equal those of torch."""

import traceback
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hybrid
from hybrid.custom_loop.cluster import Cluster
from hybrid.errors import DataError


class Of(nn.Module):
    """A module of one table."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, *args: Any) -> Tensor:
        vectors: Tensor = self.table(*args)
        return vectors


def rows(cluster: Cluster, table: nn.Module) -> tuple[Any, Tensor]:
    """Distribute a table; return its module and all of its rows."""
    model = cluster.distribute(Of(table))
    every = torch.arange(9)
    with torch.no_grad():
        return model, model(every if isinstance(table, hybrid.Embedding) else every.view(-1, 1))


IDS = torch.tensor([[1, 2, 0], [0, 0, 0], [8, 8, 3]])
JAGGED = hybrid.Jagged.of([[1], [2, 3]]), None, hybrid.Jagged.of([[1.0, 1.0], [1.0]], torch.float32)


@pytest.mark.parametrize("padding", [None, 0])
def test_embedding_equals_torch(padding: int | None) -> None:
    model, rows_RD = rows(hybrid.connect(), hybrid.Embedding(9, 4, padding_idx=padding))
    with torch.no_grad():
        for ids in (IDS, IDS.t()):
            assert torch.equal(model(ids), torch.nn.functional.embedding(ids, rows_RD, padding))
        assert model(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3, 4)
        assert model(torch.tensor(5)).shape == (4,)


@pytest.mark.parametrize("pooled_by", ["workers", "trainers"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 0])
def test_embedding_bag_equals_torch(mode: str, padding: int | None, pooled_by: str) -> None:
    table = hybrid.EmbeddingBag(9, 4, mode=mode, padding_idx=padding, pooled_by=pooled_by)
    plain, rows_RD = hybrid.EmbeddingBag(9, 4, mode=mode), None
    model = hybrid.connect().distribute(nn.ModuleDict({"padded": table, "plain": plain}))
    del plain
    with torch.no_grad():
        rows_RD = model.module["padded"](torch.arange(9).view(-1, 1))
        of_torch = torch.nn.EmbeddingBag.from_pretrained(rows_RD, mode=mode, padding_idx=padding)
        assert torch.allclose(table(IDS), of_torch(IDS))
        assert torch.allclose(table(IDS.t()), of_torch(IDS.t()))
        flat, offsets = IDS.flatten(), torch.tensor([0, 2, 2, 7])
        assert torch.allclose(table(flat, offsets), of_torch(flat, offsets))
        ends = torch.tensor([0, 2, 2, 7, 9])
        assert torch.allclose(table(hybrid.Jagged(flat, ends)), of_torch(flat, offsets))
        if mode == "sum":
            weights = torch.rand(3, 3)
            assert torch.allclose(table(IDS, None, weights), of_torch(IDS, per_sample_weights=weights))


@pytest.mark.filterwarnings("ignore:table table is called with ids that are not")
@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("layout", ["matrix", "flat", "jagged"])
def test_weights_of_bags_get_the_gradients_of_torch(layout: str, padding: int | None) -> None:
    table = hybrid.EmbeddingBag(
        9, 4, mode="sum", padding_idx=padding, optimizer=hybrid.SGD(lr=0.1), include_last_offset=True
    )
    cluster, ends = hybrid.connect(), torch.tensor([0, 2, 2, 9])
    model = cluster.distribute(Of(table))
    plain: Any = cluster.plain_module()
    for batch in cluster.batches({"id": IDS}):
        ids, weights = batch["id"], [torch.rand(3, 3).requires_grad_()] * 2
        weights[1] = weights[0].detach().clone().requires_grad_()
        flat, offsets = ids.flatten(), ends
        if layout == "matrix":
            found, expected = model(ids, None, weights[0]), plain(ids, None, weights[1])
        else:
            expected = plain(flat, offsets, weights[1].flatten())
            jagged = hybrid.Jagged(flat, offsets), None, hybrid.Jagged(weights[0].flatten(), offsets)
            found = model(*jagged) if layout == "jagged" else model(flat, offsets, weights[0].flatten())
        cluster.backward(found.square().sum(1))
        expected.square().sum(1).mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(weights[0].grad, weights[1].grad)
    torch.testing.assert_close(cluster.plain_module().state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: t(torch.tensor([[0, 9]])), DataError, "table table: id 9"),
        (lambda t: t(torch.tensor([[-1]])), DataError, "id -1"),
        (lambda t: t(torch.tensor([[0.5]])), TypeError, "integers"),
        (lambda t: t(torch.tensor([1, 2])), ValueError, "offsets"),
        (lambda t: t(torch.tensor([1, 2]), torch.tensor([0, 3])), DataError, "offsets"),
        (lambda t: t(IDS, None, torch.rand(3, 3)), ValueError, "table table: .*mode='sum'"),
        (lambda t: t(*JAGGED), DataError, "table table: .*offsets"),
        (lambda _: hybrid.Embedding(9, 4, optimizer=cast(Any, torch.optim.Adam)), TypeError, "optimizer"),
    ],
)
def test_wrong_calls_are_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(RuntimeError, match=r"model = hybrid\.connect\(\)\.distribute\(model\)"):
        hybrid.Embedding(9, 4)(IDS)
    model = hybrid.connect().distribute(Of(hybrid.EmbeddingBag(9, 4)))
    with torch.no_grad(), pytest.raises(error, match=message):
        call(model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hybrid.Embedding(0, 4), "rows"),
        (lambda: hybrid.Embedding(4, 0), "columns"),
        (lambda: hybrid.Embedding(9, 4, init="ones"), "init .* 'ones'"),
        (lambda: hybrid.Embedding(9, 4, dtype=torch.float16), "dtype .* torch.float16"),
        (lambda: hybrid.Embedding(9, 4, padding_idx=9), "padding_idx .* 9"),
        (lambda: hybrid.EmbeddingBag(9, 4, padding_idx=-1), "padding_idx .* -1"),
        (lambda: hybrid.EmbeddingBag(9, 4, mode="avg"), "mode .* 'avg'"),
        (lambda: hybrid.EmbeddingBag(9, 4, pooled_by="auto"), "pooled_by"),
        (lambda: hybrid.Embedding.from_pretrained("x", optimizer=hybrid.SGD(lr=0.1)), "freeze=False"),
        (lambda: hybrid.SGD(lr=-0.1), "lr"),
        (lambda: hybrid.AdamW(lr=float("nan")), "lr"),
        (lambda: hybrid.Adagrad(lr=0.1, eps=0.0), "eps"),
        (lambda: hybrid.Adam(lr=0.1, betas=(0.9, 1.0)), "betas"),
        (lambda: hybrid.Momentum(lr=0.1, momentum=1.0), "momentum"),
        (lambda: hybrid.Ftrl(lr=0.1, l1=-1.0), "l1"),
    ],
)
def test_invalid_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ["SGD", "Momentum", "Adagrad", "Adam", "AdamW"])
@pytest.mark.parametrize("all_rows", [False, True], ids=["touched", "all"])
@pytest.mark.parametrize("ids", ["", ()], ids=["named", "not named"])
def test_rows_without_a_call_decay_only_with_all_rows(name: str, all_rows: bool, ids: str) -> None:
    """Rows of a table without any call do not change, as parameters without gradients."""

    class Two(Of):
        def __init__(self, table: hybrid.Embedding, other: hybrid.Embedding) -> None:
            super().__init__(table)
            self.other = other

    optimizer = getattr(hybrid, name)(lr=0.1, weight_decay=0.5, all_rows=all_rows)
    cluster = hybrid.connect()
    model = cluster.distribute(
        Two(*(hybrid.Embedding(9, 4, optimizer=optimizer, ids=each) for each in ("", ids)))
    )
    before = cluster.plain_module().state_dict()
    for ids in cluster.batches(torch.arange(6), size=3):
        cluster.backward(model(ids).square().sum(1))
    now = cluster.plain_module().state_dict()
    is_changed = now["table.weight"][6:] != before["table.weight"][6:]
    assert is_changed.all() if all_rows else not is_changed.any()
    assert torch.equal(now["other.weight"], before["other.weight"])


@pytest.mark.parametrize("freeze", [True, False])
def test_frozen_pretrained_rows_do_not_change(freeze: bool, tmp_path: Path) -> None:
    rows_RD = torch.rand(9, 4)
    np.save(tmp_path / "rows.npy", rows_RD.numpy())
    optimizer = None if freeze else hybrid.SGD(lr=0.1)
    table = hybrid.Embedding.from_pretrained(
        tmp_path / "rows.npy", freeze=freeze, optimizer=optimizer, ids=""
    )
    cluster = hybrid.connect()
    model = cluster.distribute(Of(table))
    for ids in cluster.batches(torch.arange(6), size=3):
        cluster.backward(model(ids).square().sum(1))
    with torch.no_grad():
        now_RD = model(torch.arange(9))
    assert torch.equal(now_RD[6:], rows_RD[6:])
    assert torch.equal(now_RD[:6], rows_RD[:6]) is freeze


@pytest.mark.parametrize("kind", [hybrid.Embedding, hybrid.EmbeddingBag])
def test_a_table_has_no_weight(kind: Any) -> None:
    model = hybrid.connect().distribute(Of(kind(9, 4)))
    assert not hasattr(model.table, "weight")
    with pytest.raises(AttributeError, match=r"table table .* torch\.arange") as caught:
        _ = model.table.weight
    assert "weights" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("kind", [hybrid.Embedding, hybrid.EmbeddingBag])
def test_init_sets_the_distribution_of_initial_rows(kind: Any) -> None:
    _, normal_RD = rows(hybrid.connect(), kind(9, 400, init="normal", init_scale=0.1))
    assert normal_RD.std() == pytest.approx(0.1, rel=0.1)
    assert normal_RD.abs().max() > 0.2
    _, zeros_RD = rows(hybrid.connect(), kind(9, 400, init="zeros"))
    assert not zeros_RD.any()


@pytest.mark.parametrize("kind", [hybrid.Embedding, hybrid.EmbeddingBag])
def test_rows_are_stored_in_bfloat16(kind: Any) -> None:
    _, rows_RD = rows(hybrid.connect(), kind(9, 4, dtype=torch.bfloat16))
    assert rows_RD.dtype is torch.float32
    assert torch.equal(rows_RD, rows_RD.bfloat16().float())


class Shared(nn.Module):
    """Tables in a list, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        again = hybrid.Embedding(9, 2, padding_idx=3, ids="again")
        self.tables = nn.ModuleList([hybrid.Embedding(70_000, 2, ids="first"), again])
        self.again = again
        self.bag = hybrid.EmbeddingBag(5, 2, mode="sum", padding_idx=0, ids="bags")
        self.linear = nn.Linear(2, 1)

    def forward(self, first: Tensor, again: Tensor, bags: Tensor) -> Tensor:
        out: Tensor = self.linear(self.tables[0](first) + self.again(again) * self.bag(bags))
        return out.squeeze(1)


def test_plain_module_equals_the_module() -> None:
    cluster = hybrid.connect()
    model = cluster.distribute(Shared())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, again = torch.tensor([[0, 3, 69_999, 12], [3, 2, 8, 3]])
    inputs = {"first": first, "again": again, "bags": torch.tensor([[1, 0], [4, 4], [0, 0], [2, 3]])}
    for batch in cluster.batches(inputs):
        cluster.backward(model(**batch).square())
        optimizer.step()
    plain: Any = cluster.plain_module()
    assert not any(type(module).__module__.startswith("hybrid") for module in list(plain.modules())[1:])
    assert plain.tables[1] is plain.again
    assert torch.equal(plain.tables[1].weight[3], torch.zeros(2))
    with torch.no_grad():
        assert torch.allclose(plain(**inputs), model(**inputs), atol=1e-7)
    sizes = {name: {0: torch.export.Dim("n")} for name in inputs}
    exported = torch.export.export(plain.eval(), (), inputs, dynamic_shapes=sizes)
    fewer = {name: each[:3] for name, each in inputs.items()}
    assert torch.allclose(exported.module()(**fewer), plain(**fewer))
    assert isinstance(model.bag, hybrid.EmbeddingBag)

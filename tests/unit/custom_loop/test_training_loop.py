"""Training loops of one process: their steps, and the errors of wrong calls."""

import copy
import ctypes
import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import code_block
from support.fork_context import forked_process
from torch import Tensor, nn
from torch.futures import Future
from torch.optim.optimizer import register_optimizer_step_pre_hook

import hybrid
from hybrid.custom_loop.cluster import Cluster, Distributed
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.errors import ConfigError, DataError, NonFiniteError
from hybrid.updates.ticket import Ticket

View = Callable[[dict[str, Any]], Tensor]
DATA = {"id": torch.arange(8) % 5, "label": torch.arange(8.0)}


class Net(nn.Module):
    def __init__(self, ids: str = "id") -> None:
        super().__init__()
        self.table = hybrid.Embedding(5, 2, optimizer=hybrid.SGD(lr=0.1), ids=ids)
        self.linear = nn.Linear(2, 1)

    def forward(self, ids: Any) -> Tensor:
        out: Tensor = self.linear(self.table(ids))
        return out.squeeze(-1)


class ItemScores(Net):
    """A score for each item of a batch."""

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch["item"])


def connected(folder: Path, config: str) -> Cluster:
    (folder / "config.toml").write_text(config)
    return hybrid.connect(folder / "config.toml")


def started(cluster: Cluster | None = None) -> tuple[Cluster, Distributed, torch.optim.Optimizer]:
    """Distribute a module; return it with its optimizer."""
    cluster = cluster or hybrid.connect()
    model = cluster.distribute(Net())
    return cluster, model, torch.optim.SGD(model.parameters(), lr=0.1)


def errors(model: Distributed, batch: dict[str, Tensor]) -> Tensor:
    out: Tensor = (model(batch["id"]) - batch["label"]) ** 2
    return out


def ids_and_tags(size: int) -> dict[str, Any]:
    ids_L = torch.arange(2 * size)  # columns of prepared data are views of one tensor
    return {
        "ids": torch.arange(size * 4).view(size, 4),
        "deep": [{"one": ids_L[:size]}, ids_L[size:]],
        "tags": hybrid.Jagged.of([[1]] * size),
    }


class Viewed(nn.Module):
    """Calls a table with a view of the batch."""

    def __init__(self, view: View, names: list[str]) -> None:
        super().__init__()
        self.table = hybrid.Embedding(100, 2, ids=names)
        self.view = view

    def forward(self, batch: dict[str, Any]) -> Tensor:
        vectors: Tensor = self.table(self.view(batch))
        return vectors


@pytest.mark.parametrize(
    ("view", "names", "number"),
    [
        (lambda b: b["ids"], ["ids"], 1),
        (lambda b: b["deep"][0]["one"], ["deep[0]['one']"], 1),
        (lambda b: b["deep"][1], ["deep[1]", "tags"], 1),
        (lambda b: b["tags"].values, ["tags"], 1),
        (lambda b: b["ids"] + 0, ["ids"], 2),  # computed
        (lambda b: b["ids"].view(-1), ["ids"], 2),
        (lambda b: b["ids"].int(), ["ids"], 2),
        (lambda b: b["deep"][1], ["ids"], 2),
    ],
)
def test_only_ids_of_named_columns_are_looked_up_ahead(
    view: View, names: list[str], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning names other ids, which the call of the table looks up."""
    tickets, lookup = [], TableShards.lookup

    def counted(self: TableShards, ticket: Ticket, items: Any) -> Future[list[Tensor]]:
        tickets.append(ticket)
        return lookup(self, ticket, items)

    cluster = hybrid.connect()
    model = cluster.distribute(Viewed(view, names))
    monkeypatch.setattr(TableShards, "lookup", counted)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in cluster.batches([ids_and_tags(size) for size in (3, 5, 2)]):
            vectors = model(batch)
            assert len(tickets) == number
            plain: Any = cluster.plain_module()
            assert torch.equal(vectors, plain.table(view(batch)))
            cluster.backward(vectors.reshape(len(batch["ids"]), -1).sum(1))
            tickets.clear()
    assert ['hybrid.Embedding(..., ids="user")' in str(each.message) for each in caught] == [True] * (
        number - 1
    )


def test_a_missing_column_is_named() -> None:
    cluster = hybrid.connect()
    cluster.distribute(Net("item"))
    with pytest.raises(DataError, match=r"table table: .*'item'.* id, label"):
        next(cluster.batches(DATA))


def test_documented_ranking_loop_trains() -> None:
    """Each user prefers the items below 3."""
    user, item = torch.arange(12).repeat_interleave(5), torch.arange(5).repeat(12)
    label = (item < 3).float()
    cluster = hybrid.connect()
    model = cluster.distribute(ItemScores("item"))

    def loss() -> float:
        with torch.no_grad():
            values, weights = hybrid.listwise_loss(model({"item": item}), label, user)
        return float((values * weights).sum() / weights.sum())

    before = loss()
    names = {"cluster": cluster, "model": model, "train": {"user": user, "item": item, "label": label}}
    names["optimizer"] = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(20):
        exec(code_block("docs/custom_loop.md", "python", "listwise_loss"), names)
    assert loss() < 0.9 * before


def test_evaluation_between_steps_sees_the_last_update() -> None:
    cluster, model, optimizer = started()
    seen = []
    for batch in cluster.batches(DATA, size=4):
        cluster.backward(errors(model, batch))
        optimizer.step()
        with torch.no_grad():
            seen += [cluster.gather(model(test["id"])) for test in cluster.batches(DATA)]
            assert torch.equal(seen[-1], model(DATA["id"]))  # not a batch of the cluster
    assert not torch.equal(*seen)


def test_means_of_a_pass_leave_out_padding_despite_an_evaluation_within_it(tmp_path: Path) -> None:
    cluster, model, optimizer = started(connected(tmp_path, "[train]\nmicro_batches = 2\n"))
    losses = []
    for batch in cluster.batches({name: column[:3] for name, column in DATA.items()}, size=2):
        losses.append(errors(model, batch).detach() + 1)
        cluster.backward(errors(model, batch))
        optimizer.step()
        with torch.no_grad():
            assert len([*cluster.batches(DATA)]) == 1
    values = torch.cat(losses)
    assert len(values) == 4, "the last micro-batch is padding"
    assert cluster.mean(values) == pytest.approx(values[:3].mean().item())


@pytest.mark.parametrize(
    ("num_backward", "num_steps", "message"),
    [
        (2, 0, r"cluster\.backward.* step 0: .* more="),
        (1, 0, r"optimizer\.step.* step 0"),
        (0, 0, r"cluster\.backward.* step 0"),
        (0, 1, r"optimizer\.step.* cluster\.backward.* closure"),
        (1, 2, r"optimizer\.step.* cluster\.backward"),
    ],
)
def test_a_batch_takes_one_backward_and_one_step(num_backward: int, num_steps: int, message: str) -> None:
    cluster, model, optimizer = started()

    def train() -> None:
        for batch in cluster.batches(DATA, size=4):
            for _ in range(num_backward):
                cluster.backward(errors(model, batch))
            for _ in range(num_steps):
                optimizer.step()

    with pytest.raises(RuntimeError, match=message):
        train()


@pytest.mark.parametrize(
    ("loss", "weights", "error", "message"),
    [
        (Tensor.mean, None, DataError, r"\(4,\), not \[\]: "),
        (Tensor.clone, torch.tensor([1.0, -1.0, 1.0, 1.0]), DataError, "weight"),
        (Tensor.clone, torch.ones(3), DataError, "weight"),
        (Tensor.detach, None, RuntimeError, "module"),
        (lambda values: values * torch.inf, None, NonFiniteError, "step 0: .* trainer 0 is inf"),
    ],
)
def test_invalid_losses_and_weights_are_refused(
    loss: Callable[[Tensor], Tensor], weights: Tensor | None, error: type[Exception], message: str
) -> None:
    cluster, model, _ = started()
    batches = cluster.batches(DATA, size=4)
    batch = next(batches)
    with pytest.raises(error, match=message):
        cluster.backward(loss(errors(model, batch)), weights)


def test_calls_before_distribute_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"cluster\.distribute"):
        hybrid.connect().backward(torch.zeros(1))
    with pytest.raises(DataError, match=r"Linear .*hybrid\.Embedding"):
        hybrid.connect().distribute(nn.Linear(1, 1))
    net = Net()
    net.register_buffer("phases", torch.ones(1, dtype=torch.complex64))
    with pytest.raises(DataError, match=r"phases .*complex64"):
        hybrid.connect().distribute(net)
    cluster, model, _ = started()
    with pytest.raises(RuntimeError, match="already distributed"):
        cluster.distribute(Net())
    with pytest.raises(RuntimeError, match=r"cluster\.batches"):
        model(DATA["id"])
    with pytest.raises(RuntimeError, match="batch"):
        cluster.backward(torch.zeros(1))
    with pytest.raises(DataError, match="scalar"):
        cluster.gather(torch.tensor(1.0))
    with pytest.raises(ValueError, match="size"):
        cluster.batches(DATA, size=0)
    with pytest.raises(RuntimeError, match="module"):
        torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1).step()


@pytest.mark.parametrize("kind", ["load", "pass", "empty pass"])
def test_a_pass_that_was_ended_from_within_does_not_end_silently(kind: str, tmp_path: Path) -> None:
    cluster, model, optimizer = started()
    cluster.save(tmp_path / "saved", optimizer)
    outer = cluster.batches(DATA, size=4)
    cluster.backward(errors(model, next(outer)))
    optimizer.step()
    if kind == "load":
        cluster.load(tmp_path / "saved", optimizer)
    else:
        next(cluster.batches(DATA if kind == "pass" else []), None)
    with pytest.raises(RuntimeError, match="pass"):
        next(outer)


def test_skipped_step_changes_nothing(tmp_path: Path) -> None:
    cluster, model, optimizer = started(connected(tmp_path, 'train.non_finite = "skip"'))
    with torch.no_grad():
        before = model(DATA["id"])
    for number, batch in enumerate(cluster.batches(DATA, size=4)):
        cluster.backward(errors(model, batch) * (torch.nan if number == 0 else 0.0))
        optimizer.step()
    with torch.no_grad():
        assert torch.equal(model(DATA["id"]), before)


def test_clip_norm_covers_parameters_and_tables(tmp_path: Path) -> None:
    cluster, model, optimizer = started(connected(tmp_path, "train.clip_norm = 1e-3"))
    every = torch.arange(5)
    with torch.no_grad():
        before = torch.cat([model.table(every).flatten(), *(p.flatten() for p in model.parameters())])
    for batch in cluster.batches(DATA):
        cluster.backward(errors(model, batch))
        optimizer.step()
    with torch.no_grad():
        after = torch.cat([model.table(every).flatten(), *(p.flatten() for p in model.parameters())])
    assert (after - before).norm().item() == pytest.approx(0.1 * 1e-3, rel=1e-2)  # both rates are 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[dense]\nddp = "none"\n', "dense.ddp = 'none': "),
        ('[dense]\ncompile = "inductor"\n', "dense.compile = 'inductor': "),
        ("[dense]\nremote_mlp = [8]\n", "dense.remote_mlp = "),
        ('[dense]\ndevice = "cpu,cpu"\n', "dense.device = 'cpu,cpu': "),
        ("[profile]\nsteps = 5\n", "profile.steps = "),
        ('[schedule]\nkind = "cosine"\n', "schedule.kind = 'cosine': "),
        ('[train]\nupdate = "async"\n', "train.update = 'async': .* table table"),
        ("[train]\nmicro_batches = 2\n", "train.micro_batches = 2: "),
    ],
)
def test_keys_that_do_not_apply_to_custom_loops_are_refused(text: str, message: str, tmp_path: Path) -> None:
    cluster, net = connected(tmp_path, text), Net()
    net.table.optimizer = hybrid.SGD(lr=0.1, all_rows=True)

    def train() -> None:
        model = cluster.distribute(net)
        for batch in cluster.batches(DATA):
            cluster.backward(errors(model, batch), more=[(errors(model, batch), batch["label"])])

    with pytest.raises(ConfigError, match=message):
        train()


@pytest.mark.parametrize("net", [Net, lambda: nn.Sequential(hybrid.Embedding(5, 2, ids="id"))])
def test_loss_backward_names_cluster_backward(net: Callable[[], nn.Module]) -> None:
    cluster = hybrid.connect()
    model = cluster.distribute(net())
    batches = cluster.batches(DATA)
    loss = model(next(batches)["id"]).square().mean()
    with pytest.raises(RuntimeError, match=r"call cluster\.backward\(loss\)"):
        loss.backward()


def test_copy_and_state_dict_of_a_distributed_module_are_refused(tmp_path: Path) -> None:
    cluster, model, optimizer = started()
    for use in (model.state_dict, model.module.state_dict, partial(copy.deepcopy, model)):
        with pytest.raises(RuntimeError, match=r"cluster\.plain_module\(\)\.state_dict\(\)"):
            use()
    cluster.save(tmp_path / "saved", optimizer)
    assert set(cluster.plain_module().state_dict()) == {"table.weight", "linear.weight", "linear.bias"}


def test_inference_mode_evaluates() -> None:
    cluster, model, _ = started()
    with torch.no_grad():
        expected = model(DATA["id"])
    samples: Any = [{"id": int(each)} for each in DATA["id"]]
    loader = torch.utils.data.DataLoader(samples, batch_size=4)
    with torch.inference_mode():
        found = [model(batch["id"]) for batch in cluster.batches(loader)]
        assert torch.equal(torch.cat(found), expected)
        for batch in cluster.batches(DATA):
            ids = batch["id"] + 0
            model(ids)
            assert torch.equal(model(ids.copy_(DATA["id"].flip(0))), expected.flip(0))


@pytest.mark.parametrize(
    ("config", "change", "remedy"),
    [
        ("", "clip", "train.clip_norm"),
        ("", "schedule", "[schedule]"),
        ('[schedule]\nkind = "step(decay_every = 1)"\n', "schedule", None),
    ],
)
def test_parameter_changes_warn_once(config: str, change: str, remedy: str | None, tmp_path: Path) -> None:
    cluster, model, optimizer = started(connected(tmp_path, config))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5 if change == "schedule" else 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in cluster.batches(DATA, size=2):
            cluster.backward(errors(model, batch))
            if change == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    assert [remedy is not None and remedy in str(each.message) for each in caught] == [True] * bool(remedy)


@pytest.mark.parametrize(
    ("optimizer", "is_cycled", "is_refused"),
    [(hybrid.Adam, True, True), (hybrid.Adam, False, False), (hybrid.SGD, True, False)],
)
def test_momentum_that_changes_beside_momentum_of_tables_is_refused(
    optimizer: Callable[..., Any], is_cycled: bool, is_refused: bool, tmp_path: Path
) -> None:
    cluster, net = connected(tmp_path, 'schedule.kind = "one_cycle(steps = 9)"'), Net()
    net.table.optimizer = optimizer(lr=0.1)
    model = cluster.distribute(net)
    dense = torch.optim.Adam(model.parameters(), lr=0.1)
    cycle = torch.optim.lr_scheduler.OneCycleLR(dense, 0.1, total_steps=9, cycle_momentum=is_cycled)
    with pytest.raises(RuntimeError, match="cycle_momentum") if is_refused else nullcontext():
        for batch in cluster.batches(DATA, size=2):
            cluster.backward(errors(model, batch))
            dense.step()
            cycle.step()


class Twice(Net):
    """Calls its table with two computed tensors of one shape; the first is freed before the second exists."""

    def forward(self, ids: Any) -> Tensor:
        pair: tuple[Tensor, Tensor] = self.table((ids + 1) % 5), self.table((ids * 2) % 5)
        return pair[0].sum(1) - 2 * pair[1].sum(1)


@pytest.mark.filterwarnings("ignore:table table is called with ids that are not")
@pytest.mark.parametrize(
    ("text", "optimizer"),
    [
        *(('update = "sync"', name) for name in ("Momentum", "Adagrad", "Adam", "SGD")),
        *((text, "AdamW") for text in ('update = "lookahead"', 'update = "async"', "micro_batches = 2")),
    ],
)
def test_rows_whose_vectors_are_not_used_do_not_change(text: str, optimizer: str, tmp_path: Path) -> None:
    """As rows that are looked up only if the module calls the table, and uses the vectors."""
    ends = []
    for ids in (["id", "other"], []):
        cluster, net = connected(tmp_path, f"[train]\n{text}\n"), Net()
        row_optimizer = getattr(hybrid, optimizer)(lr=0.1, weight_decay=0.1)
        net.table = hybrid.Embedding(9, 2, optimizer=row_optimizer, ids=ids)
        model = cluster.distribute(net)
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in cluster.batches({**DATA, "other": DATA["id"].flip(0) + 3}, size=2):
            scores = model.linear(torch.ones(len(batch["id"]), 2)).squeeze(1)
            for column in [["id"], ["other"], []][cluster.step % 3]:
                scores = scores + model(batch[column])
            if ids:
                model.table(batch["other"])
            cluster.backward((scores - batch["label"]) ** 2)
            dense.step()
        ends.append(cluster.plain_module().state_dict())
    torch.testing.assert_close(*ends)


@pytest.mark.filterwarnings("ignore:table table is called with ids that are not")
def test_computed_ids_of_one_shape_get_their_own_vectors() -> None:
    cluster = hybrid.connect()
    model = cluster.distribute(Twice())
    for batch in cluster.batches(DATA):
        found, plain = model(batch["id"]), cluster.plain_module()
        assert torch.equal(found, plain(batch["id"]))
        break


class InPlace(nn.Module):
    """Changes the vectors of equal calls in place, before and after the next call."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: Tensor) -> Tensor:
        first = self.table(ids).mul_(3)
        second, third = self.table(ids), self.table(ids)
        second.sigmoid_()
        total = first + second + third.masked_fill_(third > 0, 0.5) + self.table(ids)
        out: Tensor = total.flatten(1).sum(1)
        return out


@pytest.mark.parametrize(
    "table", [hybrid.Embedding, hybrid.EmbeddingBag, partial(hybrid.EmbeddingBag, pooled_by="trainers")]
)
@pytest.mark.parametrize("update", ["sync", "lookahead"])
def test_changes_in_place_are_private(update: str, table: Callable[..., nn.Module], tmp_path: Path) -> None:
    cluster = connected(tmp_path, f'train.update = "{update}"')
    model = cluster.distribute(InPlace(table(5, 2, ids="id", optimizer=hybrid.SGD(lr=0.1))))
    plain: Any = cluster.plain_module()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in cluster.batches({"id": DATA["id"].view(4, 2)}, size=2):
        for grad_mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with grad_mode():
                found, expected = model(batch["id"]), plain(batch["id"])
            torch.testing.assert_close(found, expected)
        cluster.backward(found.square())
        optimizer.zero_grad()
        expected.square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(cluster.plain_module().state_dict(), plain.state_dict())


def test_a_loop_that_raised_does_not_disturb_the_next() -> None:
    """As in a notebook, where the traceback keeps the first loop alive."""
    cluster, model, optimizer = started()
    left = cluster.batches(DATA, size=4)
    cluster.backward(errors(model, next(left)))
    with pytest.raises(RuntimeError, match=r"^step 0 "):
        next(cluster.batches(DATA, size=4))
    with pytest.raises(RuntimeError, match="already distributed"):
        hybrid.connect().distribute(model.module)
    cluster, model, optimizer = started()
    again: Any = cluster.batches(DATA, size=2)
    for batch in again:
        cluster.backward(errors(model, batch))
        optimizer.step()
        break
    batches = cluster.batches(DATA, size=4)
    for step in (1, 2):
        batch = next(batches)
        again.close()
        assert cluster.step == step
        cluster.backward(errors(model, batch))
        optimizer.step()


def test_a_hook_on_optimizers_keeps_no_module_alive() -> None:
    hooks: Any = register_optimizer_step_pre_hook(lambda *_: None).hooks_dict_ref()
    distributed = started()
    num_hooks, model = len(hooks), weakref.ref(distributed[1])
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1).step()  # is not affected
    del distributed
    gc.collect()
    assert model() is None
    started()
    assert len(hooks) == num_hooks


def end_during_the_last_update() -> None:
    optimizer = hybrid.Adam(lr=0.1, all_rows=True)
    cluster = hybrid.connect()
    model = cluster.distribute(nn.Sequential(hybrid.Embedding(200_000, 16, ids="", optimizer=optimizer)))
    for ids in cluster.batches(torch.arange(8), size=4):
        cluster.backward(model(ids).sum(1))
    ctypes.pythonapi.Py_Exit(0)  # a forked process would not end its interpreter


def test_a_script_may_end_during_the_last_update() -> None:
    with forked_process(end_during_the_last_update) as process:
        process.join(60)
        assert process.exitcode == 0


@pytest.mark.parametrize("update", ["sync", "lookahead", "async"])
def test_pass_may_be_left_before_a_batch_is_trained(update: str, tmp_path: Path) -> None:
    cluster, model, optimizer = started(connected(tmp_path, f'train.update = "{update}"'))
    for num_steps in (1, 3):
        for batch in cluster.batches(DATA, size=2):
            if cluster.step == num_steps:
                break
            cluster.backward(errors(model, batch))
            optimizer.step()
        cluster.save(tmp_path / str(num_steps), optimizer)
    assert cluster.step == 3

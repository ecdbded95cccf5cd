"""A script with a custom loop, on a cluster and in one process, equals the same net in plain torch."""

import runpy
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison.cases import custom_loop_script
from comparison.cases.custom_loop_script import HALF, SCRIPT
from comparison.cases.plain_loop import check
from support.cluster import CaseError, Clusters, run_script

ALL, MICRO = ("weights", "computed", "condition"), ("micro", "condition")


def train_keys(options: tuple[str, ...], update: str) -> dict[str, Any]:
    return {"update": update, "micro_batches": 3 if "micro" in options else 1}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch looks at inputs of a graph
@pytest.mark.filterwarnings("ignore:table .* is called with ids that are not")
@pytest.mark.parametrize(
    ("options", "update"),
    [
        ((*ALL, "ranked", "trained weights"), "sync"),
        ((*MICRO, "computed"), "lookahead"),
        (("growing", "weights"), "sync"),
        *(
            pytest.param(options, update, marks=pytest.mark.long)
            for options, update in product(((), ("compile",), ("compile outside",)), ("sync", "lookahead"))
        ),
    ],
)
def test_one_process_equals_plain_torch(
    options: tuple[str, ...], update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, output = tmp_path / "config.toml", tmp_path / "end.pt"
    lines = [f"{key} = {value!r}\n" for key, value in train_keys(options, update).items()]
    config.write_text('[train]\ndtype = "float64"\n' + "".join(lines))
    monkeypatch.setattr(sys, "argv", [SCRIPT, str(output), str(config), *options])
    runpy.run_path(SCRIPT, run_name="__main__")
    check(torch.load(output), options)


@pytest.mark.parametrize(
    ("trainers", "workers", "options", "update"),
    [
        (1, 1, ("compile", "unscored"), "sync"),  # torch would compile anew without gradients
        (3, 2, (*ALL, "pooled", "twice", "trained weights"), "sync"),
        (3, 2, (*MICRO, "computed"), "lookahead"),
        (2, 2, ("ranked", "weights", "pooled", "twice"), "lookahead"),
        (2, 2, ("growing", *MICRO, "computed"), "sync"),
        (2, 2, ("growing", *ALL, "trained weights"), "lookahead"),
        pytest.param(3, 2, ALL, "sync", marks=pytest.mark.long),
        pytest.param(3, 2, ALL, "lookahead", marks=pytest.mark.long),
        pytest.param(2, 2, ("pooled", "weights", "trained weights"), "lookahead", marks=pytest.mark.long),
        pytest.param(3, 2, (*MICRO, "computed"), "sync", marks=pytest.mark.long),
        pytest.param(2, 2, ("compile outside",), "lookahead", marks=pytest.mark.long),
    ],
)
def test_a_cluster_equals_plain_torch(
    trainers: int, workers: int, options: tuple[str, ...], update: str, clusters: Clusters, tmp_path: Path
) -> None:
    output = tmp_path / "end.pt"
    clusters.get(trainers, workers).run(run_script, SCRIPT, output, *options, **train_keys(options, update))
    check(torch.load(output), options)


# With "growing", tags and pair are fixed tables.
@pytest.mark.parametrize(
    ("update", "kind"),
    [
        ("lookahead", ("growing",)),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("sync", ()), ("lookahead", ()))),
        pytest.param("sync", ("growing",), marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    update: str, kind: tuple[str, ...], clusters: Clusters, tmp_path: Path
) -> None:
    """The first run ends one step after its checkpoint."""
    resume = f"resume={tmp_path / 'run'}"
    for name, more in (("expected", ()), ("half", (resume, "half")), ("found", (resume,))):
        options = (*MICRO, "computed", *kind, *more)
        keys = train_keys(options, update)
        clusters.get(2, 2).run(run_script, SCRIPT, tmp_path / name, *options, **keys)
    expected, found = (torch.load(tmp_path / name, weights_only=True) for name in ("expected", "found"))
    assert found.pop("losses") == expected.pop("losses")[HALF - 1 :]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


TWO_MODULES = """
import sys, torch, hybrid
memory = type("Memory", (), {"state_dict": lambda _: {"best": float("nan")}})()
clusters = [hybrid.connect() for _ in range(2)]
sizes = [9, 5]
models = [c.distribute(torch.nn.Sequential(hybrid.Embedding(s, 2, ids=""))) for c, s in zip(clusters, sizes)]
for cluster, model, size in zip(clusters, models, sizes):
    cluster.save(f"{sys.argv[1]}/new-{size}")
    next(left := cluster.batches(torch.arange(size)))
    for ids in cluster.batches(torch.arange(size)):
        cluster.backward(model(ids).sum(1))
    cluster.save(f"{sys.argv[1]}/{size}", memory)
    plain = cluster.plain_module()
    for folder, is_equal in (f"new-{size}", False), (f"{size}", True):
        cluster.load(f"{sys.argv[1]}/{folder}")
        assert torch.equal(cluster.plain_module()[0].weight, plain[0].weight) is is_equal
"""

# A folder that each host has for itself: the path is the same, and the checkpoints have the same step.
LOAD_OTHER = """
import os
cluster.save(f"{sys.argv[1]}/0/copy", memory)
cluster.save(f"{sys.argv[1]}/1/copy")
os.dup2(os.open(f"{sys.argv[1]}/{cluster.rank}", os.O_RDONLY), 199)
cluster.load("/proc/self/fd/199/copy")
"""

LOAD_ALTERED = """
from pathlib import Path
from hybrid.errors import CheckpointError
if cluster.rank == 0:
    for path in Path(f"{sys.argv[1]}/5/tables").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"~")
cluster.mean(torch.zeros(1))  # waits for trainer 0
try:
    cluster.load(f"{sys.argv[1]}/5")
except CheckpointError:
    cluster.load(f"{sys.argv[1]}/new-5")
    raise ValueError("every trainer has loaded the other one")
"""


@pytest.mark.parametrize(
    ("line", "message", "update"),
    [
        ("import asyncio; raise asyncio.CancelledError", "has ended with CancelledError", "sync"),
        ("cluster.save(f'{sys.argv[1]}/{cluster.rank}')", "save different folders: /.*, and /", "lookahead"),
        (LOAD_OTHER, "make different requests: load, and load", "sync"),
        (LOAD_ALTERED, "every trainer has loaded the other one", "sync"),
    ],
)
def test_each_module_of_a_script_has_its_own_tables(
    line: str, message: str, update: str, clusters: Clusters, tmp_path: Path
) -> None:
    """Only the last lines fail."""
    (tmp_path / "script.py").write_text(TWO_MODULES + line)
    with pytest.raises(CaseError, match=message):
        clusters.get(2, 2).run(run_script, str(tmp_path / "script.py"), tmp_path, update=update)


SMALL_SLICES = """
import sys, torch, hybrid
from torch import nn
class Net(nn.Module):
    def __init__(self, has_norm):
        super().__init__()
        optimizer = hybrid.Adam(lr=0.1)
        self.table = hybrid.Embedding(9, 4, ids="id", optimizer=optimizer)
        self.gru, self.norm = nn.GRU(4, 4, batch_first=True), nn.BatchNorm1d(4) if has_norm else nn.Identity()
    def forward(self, batch):
        vectors, size = self.table(batch["id"]), len(batch["id"])
        lengths = torch.full((size,), 3)
        packed = nn.utils.rnn.pack_padded_sequence(vectors, lengths, batch_first=True)
        return self.norm(self.gru(packed)[1][0].view(size, -1)).sum(1)
cluster = hybrid.connect(sys.argv[3] if len(sys.argv) > 3 else None)
data = {"id": torch.arange(192).view(-1, 3) % 7, "label": torch.arange(64.0) % 2}
has_norm = sys.argv[2] == "norm"
model = cluster.distribute(Net(has_norm).double())
optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.1), []
for batch in cluster.batches(data, 30 if has_norm else 21):
    losses.append((model(batch) - batch["label"]) ** 2)
    cluster.backward(losses[-1])
    optimizer.step()
means = [cluster.mean(torch.cat(losses)), cluster.evaluate(data, 21)["auc"], cluster.mean(losses[-1])]
state = {**cluster.plain_module().state_dict(), "means": torch.tensor(means)}
"""


@pytest.mark.parametrize(("kind", "update"), [("norm", "sync"), ("plain", "lookahead")])
def test_ordinary_modules_train_on_small_slices(
    kind: str, update: str, clusters: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last batch has one sample; with BatchNorm, one sample on two of three trainers.

    Adam would move rows that are not in the batch.
    """
    (tmp_path / "script.py").write_text(SMALL_SLICES + "if cluster.rank == 0: torch.save(state, sys.argv[1])")
    (tmp_path / "config.toml").write_text('[train]\ndtype = "float64"\n')
    script = str(tmp_path / "script.py")
    clusters.get(3, 2).run(run_script, script, tmp_path / "found", kind, update=update)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "one"), kind, str(tmp_path / "config.toml")])
    runpy.run_path(str(tmp_path / "script.py"))
    found, expected = (torch.load(tmp_path / name, weights_only=True) for name in ("found", "one"))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


TRIED = """
import random, sys, torch, hybrid
from pathlib import Path
from torch import nn
folder, kind, sizes = Path(sys.argv[1]), sys.argv[2], []
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = hybrid.Embedding(9, 4, ids="id")
        self.norm, self.factors = nn.LayerNorm(4) if "squeezes" in kind else nn.BatchNorm1d(4), []
    def forward(self, batch):
        sizes.append(len(batch["id"]))
        self.factors.append(random.random())
        vectors = self.norm(nn.functional.dropout(self.table(batch["id"])) * sum(self.factors))
        return vectors.sum(1, keepdim=True).squeeze(*[] if "squeezes" in kind else [1])[:]
cluster = hybrid.connect()
data = {"id": torch.arange(19) % 9, "label": torch.ones(19).double()}
if "samples" in kind:
    rows = [{"id": i % 9, "label": 1.0} for i in range(19)]
    data = torch.utils.data.DataLoader(rows, batch_size=8, sampler=range(16))
model = cluster.distribute(Net().double())
optimizer = torch.optim.Adam(model.parameters())
for batch in cluster.batches([data] if kind == "unknown length" else data, 8, drop_last="drops" in kind):
    cluster.backward(model(batch) - batch["label"])
    optimizer.step()
    (folder / "stepped").touch()
tensors = cluster.plain_module().state_dict()
if cluster.rank == 1: torch.save((tensors, sizes), folder / kind)
"""


def test_a_module_is_tried_with_the_size_of_the_last_slice(clusters: Clusters, tmp_path: Path) -> None:
    """Of the last three samples, trainer 1 gets one."""
    (tmp_path / "script.py").write_text(TRIED)

    def train(kind: str) -> None:
        clusters.get(2, 2).run(run_script, str(tmp_path / "script.py"), tmp_path, kind, update="lookahead")

    with pytest.raises(CaseError, match=r"1 sample.* trainer 1 .*IndexError.*drop_last=True"):
        train("squeezes")
    assert not (tmp_path / "stepped").exists()
    train("squeezes, drops")
    train("squeezes, samples 16 of 19")
    train("known length")
    train("unknown length")
    (found, sizes), (expected, other_sizes) = (
        torch.load(tmp_path / f"{kind} length") for kind in ("known", "unknown")
    )
    assert (sizes, other_sizes) == ([1, 4, 4, 1], [4, 4, 1])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


DRAWN = """
import sys, torch, hybrid
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = hybrid.Embedding(9, 4, ids=["id", "negative"], optimizer=hybrid.Adam(lr=0.1))
    def forward(self, batch):
        calls.append((len(batch["id"]), batch["negative"].tolist()))
        scores = self.table(batch["id"]) @ self.table(batch["negative"]).mT
        return (scores - batch["negative.log_q"]).logsumexp(1)
calls = []
cluster = hybrid.connect(sys.argv[2] if len(sys.argv) > 2 else None)
model = cluster.distribute(Net())
negatives = {"negative": hybrid.Negatives(5, torch.arange(9.0))}
for _ in range(2):
    for batch in cluster.batches({"id": torch.arange(19) % 9}, 8, negatives=negatives):
        cluster.backward(model(batch))
results = calls, cluster.plain_module().state_dict()
torch.save(results, f"{sys.argv[1]}/{cluster.world_size}-{cluster.rank}")
"""


@pytest.mark.parametrize("update", ["sync", "lookahead"])
def test_all_trainers_draw_the_negatives_of_one_process(
    update: str, clusters: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call of a cluster tries the size of the last slice, with the negatives of the first step."""
    script, config = tmp_path / "script.py", tmp_path / "config.toml"
    script.write_text(DRAWN)
    config.write_text('train.dtype = "float64"')
    clusters.get(2, 2).run(run_script, str(script), tmp_path, update=update)
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path), str(config)])
    runpy.run_path(str(script))
    calls, expected = torch.load(tmp_path / "1-0", weights_only=True)
    assert [size for size, _ in calls] == [8, 8, 3] * 2
    for rank, last in enumerate((2, 1)):
        found_calls, found = torch.load(tmp_path / f"2-{rank}", weights_only=True)
        assert found_calls == [(last, calls[0][1]), *((4 if n == 8 else last, ids) for n, ids in calls)]
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


OTHER_BATCH = """
import sys, torch, hybrid
cluster = hybrid.connect()
model = cluster.distribute(torch.nn.Sequential(hybrid.Embedding(9, 2, ids="")))
batches = [torch.arange(8) for _ in range(3)]
batches[int(sys.argv[1])] += cluster.rank
with torch.set_grad_enabled(sys.argv[2] == "train"):
    for ids in cluster.batches(batches):
        vectors = model(ids)
        if sys.argv[2] == "train":
            cluster.backward(vectors.sum(1))
"""


@pytest.mark.parametrize(
    ("number", "purpose", "update"),
    [(1, "train", "sync"), (2, "train", "lookahead"), (2, "evaluate", "sync"), (2, "evaluate", "lookahead")],
)
def test_a_later_batch_that_differs_between_trainers_is_found(
    number: int, purpose: str, update: str, clusters: Clusters, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(OTHER_BATCH)
    with pytest.raises(CaseError, match=r"trainers .*read different batches"):
        clusters.get(2, 2).run(run_script, str(tmp_path / "script.py"), number, purpose, update=update)


CHANGES = """
import sys, torch, hybrid
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = hybrid.Embedding(9, 4, ids="id", optimizer=hybrid.SGD(lr=0.1))
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    def forward(self, batch):
        return self.layers(self.table(batch["id"])).sum(1)
def changed(step):
    if step == 0 or step == 2 or step == 3:
        net.layers[0].requires_grad_(step != 3)
    if step == 1 or step == 6:
        net.layers.requires_grad_(step == 6)
    if step == 4:
        net.layers[1] = nn.Linear(4, 4).double()
        net.layers.append(nn.Linear(4, 99)).append(nn.Linear(99, 4)).double()
    if step == 5:
        net.layers[0].weight = net.layers[2].weight
cluster = hybrid.connect(f"{sys.argv[1]}/job.toml")
net = Net().double()
(net.layers if sys.argv[2] == "all" else net.layers[0]).requires_grad_(False)
model = cluster.distribute(net)
data = {"id": torch.arange(21) % 9, "label": torch.arange(21.0).double() / 9}
for batch in cluster.batches(data, size=3):
    changed(cluster.step)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scores = model.layers(net.table(batch["id"])).sum(1) if sys.argv[2] == "layers" else model(batch)
    cluster.backward((scores - batch["label"]) ** 2)
    optimizer.step()
torch.save(cluster.plain_module().state_dict(), f"{sys.argv[1]}/{cluster.rank}-{cluster.world_size}")
"""


@pytest.mark.parametrize(("update", "frozen"), [("sync", "all"), ("lookahead", "first")])
def test_parameters_may_be_frozen_trained_tied_and_replaced_later(
    update: str, frozen: str, clusters: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHANGES)
    (tmp_path / "job.toml").write_text('train.dtype = "float64"')
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path), frozen])
    runpy.run_path(str(script), run_name="__main__")
    clusters.get(2, 2).run(run_script, str(script), tmp_path, frozen, update=update)
    expected, *found = (torch.load(tmp_path / name) for name in ("0-1", "0-2", "1-2"))
    for state in found:
        torch.testing.assert_close(state, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(*found, rtol=0, atol=0)
    with pytest.raises(CaseError, match=r"parameter layers\.0\.weight is not summed .* with model\(\.\.\.\)"):
        clusters.get(2, 2).run(run_script, str(script), tmp_path, "layers", update=update)


def test_a_run_continues_at_another_size_and_in_one_process(clusters: Clusters, tmp_path: Path) -> None:
    saved = str(tmp_path / "half")
    clusters.get(2, 2).run(run_script, SCRIPT, tmp_path / "half.pt", f"save={saved}")
    clusters.get(1, 1).run(run_script, SCRIPT, tmp_path / "smaller.pt", f"load={saved}")
    (tmp_path / "config.toml").write_text('[train]\ndtype = "float64"\n')
    custom_loop_script.main(str(tmp_path / "alone.pt"), {f"load={saved}"}, str(tmp_path / "config.toml"))
    first_half, *ends = (torch.load(tmp_path / f"{name}.pt") for name in ("half", "smaller", "alone"))
    for found in ends:
        check(found | {"losses": first_half["losses"] + found["losses"]})

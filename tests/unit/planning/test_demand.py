"""What a step asks for, from a configuration: messages, gradients, and what is divided among workers."""

from collections.abc import Callable
from typing import TypeAlias

import pytest

from hybrid.config import ColumnSection, RunConfig
from hybrid.input_spec import FeatureSpec, InputSpec
from workers.planning.demand import demand, messages, why_not_modelled

Configured: TypeAlias = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"update": "pipelined"}, (2, 3, 6, 1)),
        ({"update": "async"}, (2, 3, 6, 1)),
        ({"update": "sync"}, (4, 6, 12, 1)),
        ({"update": "pipelined", "micro_batches": 4}, (8, 12, 24, 1)),
    ],
    ids=str,
)
def test_messages_of_trainers_that_ask_alone(
    configured: Configured, train: dict[str, object], expected: tuple[int, ...]
) -> None:
    config = configured(train=train, cluster={"trainers": 3, "workers": 2})
    assert messages(config, 1) == expected


@pytest.mark.parametrize(
    ("trainers", "hosts", "expected"),
    [
        (8, 1, (1, 1, 8, 8)),
        (8, 2, (2, 2, 16, 4)),
        (8, 8, (8, 8, 64, 1)),
        (20, 1, (8 * 3 / 20, 3, 24, 8)),
    ],
)
def test_messages_of_trainers_that_ask_together(
    configured: Configured, trainers: int, hosts: int, expected: tuple[float, ...]
) -> None:
    cluster = {"trainers": trainers, "workers": 8}
    assert messages(configured(train={"update": "pipelined"}, cluster=cluster), hosts) == expected


def test_nobody_asks_together_in_synchronous_steps(configured: Configured) -> None:
    cluster = {"trainers": 8, "workers": 8}
    assert messages(configured(train={"update": "sync"}, cluster=cluster), 1) == (16, 16, 128, 1)


@pytest.mark.parametrize(
    ("update", "term"),
    [("pipelined", "socket_message"), ("sync", "rpc_message")],
)
def test_who_carries_messages(configured: Configured, spec: InputSpec, update: str, term: str) -> None:
    config = configured(train={"update": update})
    asked = demand(config, spec, {}, hosts=1)
    for terms in (asked.trainer, asked.workers[0]):
        assert [name for name, count in terms.items() if name.endswith("_message") and count] == [term]


@pytest.mark.parametrize(
    ("trainers", "hosts", "is_by_gloo"),
    [(8, 1, False), (9, 1, True), (8, 2, True)],
)
def test_how_gradients_meet(
    configured: Configured,
    spec: InputSpec,
    trainers: int,
    hosts: int,
    is_by_gloo: bool,
) -> None:
    config = configured(cluster={"trainers": trainers})
    terms = demand(config, spec, {}, hosts=hosts).trainer
    peers = trainers - 1
    assert (terms["gloo_round"], terms["peer"]) == ((2 * peers, 0) if is_by_gloo else (0, peers))
    assert bool(terms["gloo_byte"]) is is_by_gloo
    assert bool(terms["peer_parameter"]) is not is_by_gloo


def test_more_workers_share_the_rows_and_not_the_messages(configured: Configured, spec: InputSpec) -> None:
    one, four = (demand(configured(cluster={"workers": workers}), spec, {}, hosts=1) for workers in (1, 4))
    assert len(four.workers) == 4
    for term in ("byte", "row", "value", "updated_value"):
        assert sum(w[term] for w in four.workers) == pytest.approx(one.workers[0][term])
    assert [w["socket_message"] for w in four.workers] == [2] * 4
    assert (one.trainer["socket_message"], four.trainer["socket_message"]) == (1, 4)
    assert one.trainer["byte"] == pytest.approx(four.trainer["byte"])


def test_a_trainer_computes_its_share_of_the_batch(configured: Configured, spec: InputSpec) -> None:
    one, four = (demand(configured(cluster={"trainers": trainers}), spec, {}, hosts=1) for trainers in (1, 4))
    for term in ("sample", "flop", "value", "id"):
        assert four.trainer[term] == pytest.approx(one.trainer[term] / 4)
    assert four.trainer["parameter"] == one.trainer["parameter"] == four.dense.parameters


def test_a_sequence_is_rows_to_move_and_vectors_to_compute_with(configured: Configured) -> None:
    spec = InputSpec((), (FeatureSpec("item", 1000), FeatureSpec("seen", 1000, multi_hot=True)))
    config = configured(train={"batch_size": 100}, cluster={"trainers": 1}, dense={"net": "dcn_v2"})
    apart = config.replace(columns={"seen": ColumnSection(pooling="none", max_ids=5)})
    pooled, sequence = (demand(each, spec, {"seen": 3.0}, hosts=1) for each in (config, apart))
    dim = config.embedding.dim
    assert (pooled.trainer["value"], sequence.trainer["value"]) == (100 * 2 * dim, 100 * 6 * dim)
    assert sequence.trainer["byte"] > 1.2 * pooled.trainer["byte"]
    assert sequence.trainer["flop"] > 2 * pooled.trainer["flop"]


@pytest.mark.parametrize(
    ("dense", "reason"),
    [
        ({}, None),
        ({"remote_mlp": (8,)}, "dense.remote_mlp is set"),
        ({"parallel": "tensor"}, "dense.parallel is tensor"),
        ({"device": "cuda:1"}, "dense.device is cuda:1"),
    ],
    ids=str,
)
def test_what_has_no_costs_is_counted_without_its_net(
    configured: Configured, spec: InputSpec, dense: dict[str, object], reason: str | None
) -> None:
    config = configured(dense=dense)
    assert why_not_modelled(config) == reason
    assert bool(demand(config, spec, {}, hosts=1).trainer["flop"]) is (reason is None)

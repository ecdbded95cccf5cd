"""Plans of clusters: messages, bytes, memory, and what limits them."""

import dataclasses
import math
from typing import Any

import pytest

from hybrid.config import RunConfig
from hybrid.errors import ConfigError
from hybrid.input_spec import FeatureSpec, InputSpec
from workers.planning.step_model import NETWORK, TRAINERS, WORKERS, Hosts, Plan, make_plan

SPEC = InputSpec(("x", "y"), tuple(FeatureSpec(f"c{k}", 1000) for k in range(4)))


def plan(hosts: Hosts | int = 1, spec: InputSpec = SPEC, **sections: dict[str, Any]) -> Plan:
    """Plan a pipelined run; keyword arguments are keys of their sections."""
    config = RunConfig()
    sections["train"] = {"update": "pipelined"} | sections.get("train", {})
    for name, keys in sections.items():
        config = config.replace(**{name: dataclasses.replace(getattr(config, name), **keys)})
    if isinstance(hosts, int):
        hosts = Hosts(hosts, 64, math.inf, math.inf)
    means = {each.name: 3.0 for each in spec.sparse_features if each.multi_hot}
    return make_plan(config, spec, means, hosts)


@pytest.mark.parametrize(
    ("train", "trainers", "workers", "hosts", "expected"),
    [
        ({}, 3, 2, 1, 6),
        ({"update": "async"}, 3, 2, 1, 6),
        ({"update": "sync"}, 3, 2, 1, 12),
        ({"micro_batches": 4}, 3, 2, 1, 24),
        ({}, 8, 8, 1, 8),  # the trainers of a host send together
        ({}, 8, 8, 2, 16),
        ({}, 8, 8, 8, 64),
        ({}, 20, 8, 1, 24),
        ({"update": "sync"}, 8, 8, 1, 128),
    ],
    ids=str,
)
def test_messages(train: dict[str, Any], trainers: int, workers: int, hosts: int, expected: int) -> None:
    found = plan(hosts, train=train, cluster={"trainers": trainers, "workers": workers})
    assert [found.links[link].messages for link in ("trainer -> worker", "worker -> trainer")] == [
        expected
    ] * 2


def test_messages_and_bytes_between_hosts() -> None:
    """Trainer 0 with worker 1, trainer 1 with workers 0 and 2, in both directions, and a ring of two."""
    found = plan(2, cluster={"trainers": 2, "workers": 3})
    count = {name: link.messages for name, link in found.links.items()}
    assert count == {
        "trainer -> worker": 6,
        "worker -> trainer": 6,
        "trainer -> trainer": 4,
        "host -> host": 2 * 3 + 4,
    }
    moved = found.traffic.up_bytes_W + found.traffic.down_bytes_W
    ring = found.links["trainer -> trainer"].num_bytes
    assert found.links["host -> host"].num_bytes == pytest.approx(moved.sum() + ring)


@pytest.mark.parametrize(("trainers", "hosts", "is_ring"), [(8, 1, False), (9, 1, True), (8, 2, True)])
def test_trainers_of_a_host_reduce_in_shared_memory(trainers: int, hosts: int, is_ring: bool) -> None:
    assert ("trainer -> trainer" in plan(hosts, cluster={"trainers": trainers}).links) is is_ring


@pytest.mark.parametrize(
    ("trainers", "workers", "bytes_per_second", "limit"),
    [(1, 8, math.inf, TRAINERS), (64, 1, math.inf, WORKERS), (2, 2, 1e6, NETWORK)],
)
def test_limits(trainers: int, workers: int, bytes_per_second: float, limit: str) -> None:
    count = trainers + workers
    found = plan(
        Hosts(count, 1, math.inf, bytes_per_second), cluster={"trainers": trainers, "workers": workers}
    )
    assert found.limit == limit
    assert found.seconds[limit] == max(found.seconds.values())
    assert found.step_seconds >= found.seconds[limit]
    assert sum(found.fractions.values()) == (0 if limit == NETWORK else pytest.approx(1))


def test_roles_share_the_cores_of_a_host() -> None:
    cluster = {"trainers": 2, "workers": 3}
    many, one = (plan(Hosts(1, cores, math.inf, 1.0), cluster=cluster) for cores in (64, 1))
    assert many.seconds[NETWORK] == 0
    assert one.step_seconds == pytest.approx(
        64 * many.seconds["cores of a host"] / many.seconds[TRAINERS] * many.step_seconds
    )
    apart = plan(5, cluster=cluster)
    assert plan(Hosts(2, 1, math.inf, math.inf), cluster=cluster).step_seconds > apart.step_seconds


def test_roles_wait_for_each_other_in_synchronous_steps() -> None:
    found = plan(train={"update": "sync"})
    times = found.seconds[TRAINERS] + found.seconds[WORKERS]
    busy = plan().step_seconds / max(plan().seconds.values())
    assert found.step_seconds == pytest.approx(times * busy)


@pytest.mark.parametrize(("update", "copies"), [("pipelined", 1), ("sync", 0)])
def test_memory_of_optimizers_that_step_all_rows(update: str, copies: int) -> None:
    """4 tables of 1,000 rows of 16 values of 4 bytes."""
    touched, all_rows = (
        plan(
            train={"update": update},
            embedding={"optimizer": f"adam(weight_decay = 0.1, all_rows = {each})"},
        )
        for each in ("false", "true")
    )
    assert all_rows.host_bytes - touched.host_bytes == pytest.approx(copies * 4 * 1000 * 16 * 4)


@pytest.mark.parametrize(
    ("dense", "reason"),
    [
        ({"remote_mlp": (8,)}, "remote_mlp"),
        ({"tensor_size": 2}, "tensor"),
        ({"device": "cuda:1"}, "cuda:1"),
    ],
    ids=str,
)
def test_nets_without_measured_costs(dense: dict[str, Any], reason: str) -> None:
    assert reason in plan(dense=dense).unknown
    assert not plan().unknown


def test_more_hosts_than_roles() -> None:
    with pytest.raises(ConfigError, match="--hosts = 6"):
        plan(6, cluster={"trainers": 2, "workers": 3})

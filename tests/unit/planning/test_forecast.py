"""What limits a cluster: each limit where it must, from costs and hosts made for it."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from hybrid.config import RunConfig
from hybrid.errors import ConfigError
from hybrid.input_spec import InputSpec
from workers.planning.costs import Costs
from workers.planning.demand import Demand, demand
from workers.planning.forecast import NETWORK, TRAINERS, WORKERS, Forecast, Hosts, forecast

Configured: TypeAlias = Callable[..., RunConfig]
Priced: TypeAlias = Callable[..., Costs]
TRAINER_STEP, WORKER_STEP = {"step": 0.010}, {"step": 0.004}


def hosts(count: int = 1, cores: int = 64, bytes_per_second: float = math.inf) -> Hosts:
    return Hosts(count, cores, math.inf, bytes_per_second)


@pytest.fixture
def asked(configured: Configured, spec: InputSpec) -> Callable[..., Demand]:
    """The demand of 2 trainers and 3 workers."""

    def build(update: str = "pipelined", count: int = 1, **embedding: Any) -> Demand:
        cluster = {"trainers": 2, "workers": 3}
        config = configured(train={"update": update}, cluster=cluster, embedding=embedding)
        return demand(config, spec, {}, hosts=count)

    return build


def test_the_slowest_role_limits_where_there_are_cores_enough(
    asked: Callable[..., Demand], priced: Priced
) -> None:
    found = forecast(asked(), priced(TRAINER_STEP, WORKER_STEP), hosts())
    assert (found.limit, found.step_seconds) == (TRAINERS, 0.010)
    assert found.samples_per_second == pytest.approx(1024 / 0.010)
    assert found.reasons["step"] == 1
    found = forecast(asked(), priced(TRAINER_STEP, {"step": 0.03}), hosts())
    assert (found.limit, found.step_seconds) == (WORKERS, 0.03)


def test_roles_that_share_cores_take_as_long_as_all_together(
    asked: Callable[..., Demand], priced: Priced
) -> None:
    found = forecast(asked(), priced(TRAINER_STEP, WORKER_STEP), hosts(cores=2))
    assert found.step_seconds == pytest.approx((2 * 0.010 + 3 * 0.004) / 2)
    assert found.limit == TRAINERS  # 20 of 32 ms
    found = forecast(asked(), priced(TRAINER_STEP, {"step": 0.009}), hosts(cores=2))
    assert found.limit == WORKERS  # 27 of 47 ms, though none is slower than a trainer


def test_roles_are_dealt_to_hosts_in_turn(asked: Callable[..., Demand], priced: Priced) -> None:
    """Trainers 0 and 1, then workers 0, 1, 2: with two hosts, 0 has a trainer and workers 0 and 2."""
    found = forecast(asked(count=2), priced(TRAINER_STEP, WORKER_STEP), hosts(2, cores=1))
    assert found.step_seconds == pytest.approx(0.010 + 2 * 0.004)
    apart = forecast(asked(count=5), priced(TRAINER_STEP, WORKER_STEP), hosts(5, cores=1))
    assert apart.step_seconds == 0.010


def test_who_waits_is_not_busy(asked: Callable[..., Demand], priced: Priced) -> None:
    found = forecast(asked(), priced(TRAINER_STEP, WORKER_STEP, busy=0.8), hosts())
    assert found.step_seconds == pytest.approx(0.010 / 0.8)


def test_in_synchronous_steps_they_wait_for_each_other(asked: Callable[..., Demand], priced: Priced) -> None:
    found = forecast(asked("sync"), priced(TRAINER_STEP, WORKER_STEP), hosts())
    assert found.step_seconds == pytest.approx(0.014)


def test_the_network_carries_what_leaves_a_host_and_what_reaches_it(
    asked: Callable[..., Demand], priced: Priced
) -> None:
    """With a host for each role, that of a worker carries all that it says to both trainers."""
    demanded = asked(count=5)
    found = forecast(demanded, priced({}, {}), hosts(5, bytes_per_second=1e6))
    ups, downs = demanded.traffic.up_bytes_W, demanded.traffic.down_bytes_W
    ring = demanded.trainer["gloo_byte"]
    busiest = max(2 * ups.max(), ups.sum() + ring, downs.sum() + ring, 2 * downs.max())
    assert (found.limit, found.reasons) == (NETWORK, {})
    assert found.step_seconds == pytest.approx(busiest / 1e6)
    assert "host -> host" in found.links


def test_nothing_leaves_a_single_host(asked: Callable[..., Demand], priced: Priced) -> None:
    found = forecast(asked(), priced(TRAINER_STEP, WORKER_STEP), hosts(bytes_per_second=1e-9))
    assert found.seconds[NETWORK] == 0
    assert set(found.links) == {"trainer -> worker", "worker -> trainer"}


def test_messages_of_every_link(asked: Callable[..., Demand], priced: Priced) -> None:
    found = forecast(asked(count=2), priced(TRAINER_STEP, WORKER_STEP), hosts(2))
    count = {name: link.messages for name, link in found.links.items()}
    # Trainer 0 with worker 1, trainer 1 with workers 0 and 2, there and back; and a ring of two.
    assert count == {
        "trainer -> worker": 6,
        "worker -> trainer": 6,
        "trainer -> trainer": 4,
        "host -> host": 2 * 3 + 4,
    }


def test_bytes_between_hosts_are_those_of_pairs_on_two_of_them(
    asked: Callable[..., Demand], priced: Priced
) -> None:
    demanded = asked(count=2)
    found = forecast(demanded, priced({}, {}), hosts(2))
    moved = demanded.traffic.up_bytes_W + demanded.traffic.down_bytes_W
    pairs = moved[1] + moved[0] + moved[2]
    ring = 2 * demanded.trainer["gloo_byte"]
    assert found.links["host -> host"].num_bytes == pytest.approx(pairs + ring)


def test_memory_is_that_of_rows_processes_and_nets(asked: Callable[..., Demand], priced: Priced) -> None:
    demanded = asked()
    found: Forecast = forecast(demanded, priced({}, {}), hosts())
    rows = sum(shard.num_bytes for shard in demanded.placement.shards)
    assert found.trainer_bytes == 100 + 16 * demanded.dense.parameters
    assert found.host_bytes == pytest.approx(2 * found.trainer_bytes + rows + 3 * 1000)
    assert 1000 + rows / 3 <= found.worker_bytes < 1000 + rows


@pytest.mark.parametrize(("update", "copies"), [("pipelined", 1), ("sync", 0)])
def test_all_rows_that_take_every_step_are_kept_twice_for_checkpoints_of_pipelined_runs(
    update: str, copies: int, asked: Callable[..., Demand], priced: Priced
) -> None:
    """4 tables of 1,000 rows of 16, of 4 bytes a value."""
    touched, whole = (
        forecast(asked(update, weight_decay=0.1, all_rows=all_rows), priced({}, {}), hosts())
        for all_rows in (False, True)
    )
    assert whole.host_bytes - touched.host_bytes == pytest.approx(copies * 4 * 1000 * 16 * 4)


def test_more_hosts_than_roles(asked: Callable[..., Demand], priced: Priced) -> None:
    with pytest.raises(ConfigError, match=r"^--hosts = 6: must be at most the 5 trainers and workers$"):
        forecast(asked(), priced({}, {}), hosts(6))

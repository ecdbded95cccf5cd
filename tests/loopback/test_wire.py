"""Calls across RPC: what comes back when they fail; and what the process listens on."""

from __future__ import annotations

import gc
import threading
import weakref

import psutil
import pytest
import torch

from hybrid import wire
from hybrid.errors import ConfigError
from hybrid.topology import MASTER

pytestmark = pytest.mark.usefixtures("loopback")

release = threading.Event()


class Service:
    """Something to call."""

    def double(self, number: int) -> int:
        return 2 * number

    def refuse(self) -> None:
        raise ConfigError("dense.net", "is not to my taste", "mlp")

    def break_down(self) -> None:
        raise KeyError("no such thing")

    def hang(self) -> None:
        assert release.wait(30.0)


@pytest.fixture
def service() -> wire.Remote[Service]:
    made: wire.Remote[Service] = wire.create(MASTER, Service, timeout_seconds=5.0).wait()
    return made


def test_a_call_returns_its_value(service: wire.Remote[Service]) -> None:
    assert service.call("double", 21).wait() == 42


def test_an_error_of_the_users_keeps_its_words(service: wire.Remote[Service]) -> None:
    with pytest.raises(wire.RemoteError, match=r"^dense\.net = 'mlp': is not to my taste$") as caught:
        service.call("refuse").wait()
    assert caught.value.role == MASTER


def test_any_other_error_names_role_and_type(service: wire.Remote[Service]) -> None:
    with pytest.raises(wire.RemoteError, match=r"^master on \S+: KeyError: 'no such thing'$") as caught:
        service.call("break_down").wait()
    assert "break_down" in caught.value.failure.stack


def test_a_constructor_may_fail() -> None:
    with pytest.raises(wire.RemoteError, match="TypeError"):
        wire.create(MASTER, Service, "unwanted", timeout_seconds=5.0).wait()


def test_a_role_that_does_not_answer_is_lost(service: wire.Remote[Service]) -> None:
    release.clear()
    try:
        with pytest.raises(wire.LostError, match=r"^master does not answer"):
            service.call("hang", timeout_seconds=0.2).wait()
    finally:
        release.set()


def test_vitals() -> None:
    vitals = wire.ping(MASTER, 5.0).wait()
    assert vitals.pid == psutil.Process().pid
    assert vitals.available_bytes > 2**20


def test_answers_are_let_go(service: wire.Remote[Service]) -> None:
    """A call that held itself through its future's callback would keep every answer for ever."""
    call = service.call("double", 1)
    call.wait()
    dead = weakref.ref(call)
    del call
    gc.collect()
    assert dead() is None


def test_nothing_listens_beyond_loopback() -> None:
    listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert listening
    assert {c.laddr.ip for c in listening} <= {"127.0.0.1", "::1"}


def test_a_future_completed_by_another_thread_keeps_its_gradient() -> None:
    """What lookups rely on: an answer computed later, elsewhere, is still part of the graph."""
    rref = torch.distributed.rpc.RRef(Scale())
    with torch.distributed.autograd.context() as context_id:
        answer = torch.distributed.rpc.rpc_sync("master", scaled, args=(rref, torch.ones(2)))
        torch.distributed.autograd.backward(context_id, [answer.sum()])
    assert rref.local_value().gradients == [[1.0, 1.0]]


class Scale:
    def __init__(self) -> None:
        self.gradients: list[list[float]] = []


@torch.distributed.rpc.functions.async_execution  # type: ignore[untyped-decorator]
def scaled(
    rref: torch.distributed.rpc.RRef[Scale], value: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def later() -> None:
        weight = torch.full_like(value, 3.0, requires_grad=True)
        weight.register_hook(lambda grad: rref.local_value().gradients.append(grad.tolist()))
        future.set_result(weight * value)

    threading.Thread(target=later).start()
    return future

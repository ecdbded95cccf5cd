"""Calls across RPC: what comes back when they fail; and what the process listens on."""

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import pytest
import torch
from torch import nn
from torch.distributed import autograd as dist_autograd, rpc

from hybrid import transport
from hybrid.dense.hosted_net import HostedNet
from hybrid.embedding.bags import Bags
from hybrid.embedding.placement import place
from hybrid.embedding.table_spec import OptimizerSpec, Pooling, TableSpec
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.errors import ConfigError
from hybrid.topology import MASTER
from hybrid.updates.ticket import Purpose, Ticket
from hybrid.updates.update_rules import UpdateRules

pytestmark = pytest.mark.usefixtures("loopback")

release = threading.Event()
built = threading.Event()


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Service:
    """Something to call."""

    def double(self, number: int) -> int:
        return 2 * number

    def close(self) -> None:
        raise ConfigError("dense.net", "is not to my taste", "mlp")

    def break_down(self) -> None:
        raise KeyError("no such thing")

    def break_silently(self) -> None:
        raise Wordless

    def hang(self) -> None:
        assert release.wait(30.0)


@pytest.fixture
def service() -> transport.Remote[Service]:
    made: transport.Remote[Service] = transport.create(MASTER, Service, timeout_seconds=5.0).wait()
    return made


def test_a_call_returns_its_value(service: transport.Remote[Service]) -> None:
    assert service.call(Service.double, 21).wait() == 42


def test_an_error_keeps_its_message_and_close_releases_the_object(service: transport.Remote[Service]) -> None:
    with pytest.raises(transport.RemoteError, match=r"^dense\.net = 'mlp': ") as caught:
        service.call(Service.close).wait()
    assert caught.value.role == MASTER
    with pytest.raises(transport.RemoteError, match="KeyError"):
        service.call(Service.double, 21).wait()


@pytest.mark.parametrize(
    ("method", "text"),
    [(Service.break_down, "KeyError: 'no such thing'"), (Service.break_silently, "Wordless")],
)
def test_any_other_error_names_role_line_and_type(
    method: Callable[[Service], None],
    text: str,
    service: transport.Remote[Service],
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = method.__name__
    said = rf"^master on \S+: \S*test_wire.py:\d+, in {name}: {text}$"
    with pytest.raises(transport.RemoteError, match=said) as caught:
        service.call(method).wait()
    assert caught.value.failure.is_logged
    assert name in caplog.text


class Choosy(nn.Module):
    """Takes its time, and then only what it likes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        release.wait(0.05)
        if name == "mlp":
            raise ConfigError("dense.net", "is not to my taste", name)
        {"dlrm": built}[name].set()


def test_create_module_returns_after_construction() -> None:
    release.clear()
    transport.create_module(MASTER, Choosy, "dlrm")
    assert built.is_set()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mlp", r"^dense\.net = 'mlp': "),
        ("longer", r"^master on \S+: \S*test_wire.py:\d+, in __init__: KeyError: 'longer'$"),
    ],
)
def test_the_constructor_of_a_module_may_fail(name: str, message: str) -> None:
    with pytest.raises(transport.RemoteError, match=message):
        transport.create_module(MASTER, Choosy, name)


def test_a_role_that_does_not_answer_is_lost(service: transport.Remote[Service]) -> None:
    release.clear()
    try:
        with pytest.raises(transport.LostError, match=r"^master does not respond"):
            service.call(Service.hang, timeout_seconds=0.2).wait()
        with pytest.raises(transport.RemoteError, match="no such thing"):  # does not wait for the other
            transport.gather([service.call(Service.hang), service.call(Service.break_down)])
    finally:
        release.set()


def test_responses_are_released(service: transport.Remote[Service]) -> None:
    """A call that held itself through its future's callback would keep every answer for ever."""
    call = service.call(Service.double, 1)
    call.wait()
    dead = weakref.ref(call)
    del call
    gc.collect()
    assert dead() is None


class Caller:
    """A trainer's place: calls from here to a worker, whose errors the master is told."""

    def __init__(self, tables: transport.RemoteTables, net: transport.RemoteNet) -> None:
        self._tables = tables
        self._net = net

    def lookup(self, step: int) -> None:
        self._tables.lookup(Ticket(0, step, step), [ONE_ROW]).wait()

    def send(self, step: int) -> None:
        """NaN as the gradient of rows that were looked up."""
        ticket = Ticket(0, step, step, purpose=Purpose.PREFETCH)
        self._tables.send_gradients(ticket, [torch.full((1, 2), torch.nan)]).wait()

    def norm(self, step: int) -> None:
        self._tables.squared_norm(step).wait()

    def train_net(self, step: int) -> None:
        with dist_autograd.context() as context_id:
            output = self._net(Ticket(0, step, step), torch.full((1, 2), torch.nan))
            dist_autograd.backward(context_id, [output.sum()])

    def net_norm(self, step: int) -> None:
        self._net.squared_norm(step).wait()


Method: TypeAlias = Callable[[Caller, int], None]
ONE_ROW = (0, Bags(torch.tensor([1])))


@contextmanager
def hosted_table(rules: UpdateRules, rate: float = 1.0) -> Iterator[transport.RemoteTables]:
    """Six rows of two values."""
    table = TableSpec("t", 6, 2, Pooling.SUM, ("t",), OptimizerSpec("sgd", rate), 1.0)
    tables = transport.RemoteTables(
        MASTER, transport.create_module(MASTER, TableShards, place([table], 1), 0, rules)
    )
    tables.call(TableShards.initialize, 1).wait()
    try:
        yield tables
    finally:
        tables.call(TableShards.close).wait()


class SmallNet(HostedNet):
    def __init__(self, rules: UpdateRules) -> None:
        net = nn.Linear(2, 2)
        super().__init__(net, torch.optim.SGD(net.parameters(), lr=0.1), rules)


@pytest.fixture
def caller() -> Iterator[transport.Remote[Caller]]:
    rules = UpdateRules(1, clip_norm=1.0, timeout_seconds=5.0)
    net = transport.RemoteNet(MASTER, transport.create_module(MASTER, SmallNet, rules))
    with hosted_table(rules) as tables:
        for step in range(2):
            tables.lookup(Ticket(0, step, 0, purpose=Purpose.PREFETCH), [ONE_ROW]).wait()
        yield transport.create(MASTER, Caller, tables, net, timeout_seconds=5.0).wait()
    net.call(SmallNet.close).wait()


@pytest.mark.parametrize(
    ("cause", "waiting", "later", "what"),
    [
        (
            Caller.send,
            [Caller.lookup, Caller.norm],
            [Caller.lookup, Caller.norm, Caller.send],
            "table t, row 1,",
        ),
        (Caller.train_net, [Caller.net_norm], [Caller.train_net, Caller.net_norm], "the remote net's weight"),
    ],
)
def test_a_gradient_that_is_not_finite_fails_all_later_calls(
    caller: transport.Remote[Caller], cause: Method, waiting: list[Method], later: list[Method], what: str
) -> None:
    """Whether they were waiting for the next step already, or ask when this one has failed."""
    calls = [caller.call(method, 1) for method in waiting]
    caller.call(cause, 0).wait()
    # The later calls only after those that waited have seen the failure.
    for call in itertools.chain(calls, (caller.call(method, 1) for method in later)):
        with pytest.raises(transport.RemoteError) as caught:
            call.wait()
        assert str(caught.value).startswith(f"step 0: the gradient of {what} ")


@pytest.mark.parametrize("method", [Caller.lookup, Caller.norm, Caller.train_net])
def test_a_missing_response_names_both_roles(caller: transport.Remote[Caller], method: Method) -> None:
    """Those between two roles that others may reach; here they wait for gradients that do not come."""
    seconds = rpc.get_rpc_timeout()
    rpc._set_rpc_timeout(0.2)
    try:
        with pytest.raises(
            transport.RemoteError, match=r"^master on \S+: master does not respond \(RPCErr.*\)$"
        ):
            caller.call(method, 1, timeout_seconds=seconds).wait()
    finally:
        rpc._set_rpc_timeout(seconds)


def test_a_late_trainer_is_named_before_a_call_times_out() -> None:
    seconds = rpc.get_rpc_timeout()
    rpc._set_rpc_timeout(0.3)
    try:
        with hosted_table(UpdateRules(2, timeout_seconds=0.4)) as tables, dist_autograd.context():
            ticket = Ticket(0, 0, 0, purpose=Purpose.PREFETCH)
            (vectors,) = tables.lookup(ticket, [ONE_ROW]).wait()
            tables.send_gradients(ticket, [vectors]).wait()
            with pytest.raises(RuntimeError, match="step 0: no gradients from trainer 1"):
                tables.lookup(Ticket(0, 1, 1), [ONE_ROW]).wait()
    finally:
        rpc._set_rpc_timeout(seconds)

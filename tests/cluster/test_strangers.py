"""Processes without the secret, beside a cluster and against one process: nothing of theirs runs."""

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from support.fork_context import STOP_SECONDS, fork_context, forked_process
from support.socket_ends import rpc_of_one
from torch.distributed import rpc
from torch.distributed.rpc import api, internal

from hybrid import transport
from hybrid.security.rejections import parse_rejection
from hybrid.security.signed_pickler import SignedPickler, addressed_to
from hybrid.topology import MASTER, Role
from hybrid.transport import endpoints, stubs

SECONDS = 10.0
ATTEMPT_SECONDS = 1.0  # what is not answered at once is not answered
# What a library that trusts its peers might take for a length, and try to have so much memory.
HUGE = struct.pack("<Q", 1 << 62)


def stranger_at(address: str) -> rpc.WorkerInfo:
    """Join nothing, and have torch's RPC speak with the process at ``address`` all the same."""
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    store = dist.HashStore()
    for key, value in {"names/0": "master", "addrs/master": address, "rpcIsStaticGroup": "true"}.items():
        store.set(key, value)
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], rpc_timeout=ATTEMPT_SECONDS)
    agent = rpc.TensorPipeAgent(store, "stranger", 1, 2, options, {}, [])
    torch.distributed.autograd._init(1)
    api._init_rpc_states(agent)
    return agent.get_worker_info("master")


def attack(address: str, mark: Path, told: Connection) -> None:
    """Try calls that run code or take much memory, and payloads that are no pickles."""
    victim = stranger_at(address)

    def send(payload: Any) -> Any:
        return rpc._invoke_rpc_python_udf(victim, payload, [], ATTEMPT_SECONDS, False).wait()

    attempts: list[Callable[[], Any]] = [
        lambda: rpc.rpc_sync("master", os.mkdir, args=(str(mark),)),
        lambda: rpc.remote("master", os.mkdir, args=(str(mark),)).to_here(timeout=ATTEMPT_SECONDS),
        lambda: rpc.rpc_sync("master", len, args=(torch.zeros(1).expand(1 << 40),)),
        lambda: send(b""),
        lambda: send(os.urandom(1000)),
        lambda: send(HUGE * 100),
    ]
    told.send([_outcome(attempt) for attempt in attempts])
    os._exit(0)


def call_twice(address: str, told: Connection) -> None:
    """Have an operator of torch run, which asks for no signature; and again when told so."""
    stranger_at(address)
    for _ in range(2):
        told.send(_outcome(lambda: rpc.rpc_sync("master", torch.neg, args=(torch.ones(1),))))
        told.recv()
    os._exit(0)


def _outcome(attempt: Callable[[], Any]) -> str:
    try:
        return f"answered {attempt()}"
    except Exception as error:  # what the stranger sees
        return f"{type(error).__name__}: {error}"


@contextmanager
def process_of_a_stranger(target: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """Another process that runs ``target(*args, connection)``; the other end of the connection."""
    ours, theirs = fork_context().Pipe()
    with forked_process(target, *args, theirs):
        yield ours


def answer_of(stranger: Connection) -> Any:
    assert stranger.poll(STOP_SECONDS)
    return stranger.recv()


def address_in(store: dist.HashStore) -> str:
    (key,) = [key for key in store.list_keys() if key.endswith("addrs/master")]
    return store.get(key).decode()


def test_unauthenticated_calls_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stubs, "close_listeners_after", lambda *_: nullcontext())
    store = dist.HashStore()
    with rpc_of_one(store, ATTEMPT_SECONDS):
        pickler = internal._internal_rpc_pickler
        assert isinstance(pickler, SignedPickler)
        memory = psutil.Process().memory_info().rss
        with process_of_a_stranger(attack, address_in(store), tmp_path / "mark") as stranger:
            outcomes = answer_of(stranger)
        # It learns nothing but that it was not answered.
        assert {outcome.partition(":")[0] for outcome in outcomes} <= {"RuntimeError", "EOFError"}
        assert len(outcomes) == 6
        assert not any(map(parse_rejection, outcomes))
        assert pickler.rejections.count == len(outcomes)
        assert transport.ping(MASTER, SECONDS).wait().host == socket.gethostname()
        assert psutil.Process().memory_info().rss - memory < 64 << 20
    assert not (tmp_path / "mark").exists()
    assert not any(
        isinstance(each, SignedPickler) for each in (internal._internal_rpc_pickler, api._default_pickler)
    )


def test_the_caller_of_a_call_with_a_deferred_response_gets_its_error() -> None:
    with rpc_of_one(dist.HashStore(), ATTEMPT_SECONDS):
        with addressed_to("worker0"), pytest.raises(RuntimeError) as raised:
            rpc.rpc_sync("master", endpoints.squared_norm, (0, 0))
        assert "not signed" in (parse_rejection(str(raised.value)) or "")
        with addressed_to("master"), pytest.raises(RuntimeError, match="KeyError: 99"):
            rpc.rpc_sync("master", endpoints.squared_norm, (99, 0))


def test_a_peer_that_connected_during_the_start_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    with ExitStack() as stack:
        strangers: list[Connection] = []

        open_connection = stubs.open_connection

        def open_connection_after_a_stranger(role: Role) -> transport.Pending[torch.Tensor]:
            strangers.append(stack.enter_context(process_of_a_stranger(call_twice, address_in(store))))
            assert answer_of(strangers[0]).startswith("answered"), "the window is no window"
            return open_connection(role)

        monkeypatch.setattr(stubs, "open_connection", open_connection_after_a_stranger)
        with rpc_of_one(store, ATTEMPT_SECONDS):
            strangers[0].send("again")
            assert answer_of(strangers[0]).startswith("RuntimeError")
            assert transport.ping(MASTER, SECONDS).wait().host == socket.gethostname()

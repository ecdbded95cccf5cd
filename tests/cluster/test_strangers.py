"""Processes without the secret, beside a cluster and against one process: nothing of theirs runs."""

from __future__ import annotations

import multiprocessing
import os
import selectors
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
from support.cluster import PRELOAD, STOP_SECONDS, Clusters
from torch.distributed import rpc
from torch.distributed.rpc import api, internal

from hybrid import wire
from hybrid.secret import Secret
from hybrid.topology import MASTER, Topology
from hybrid.trust.pickler import REFUSED, SignedPickler, addressed_to
from hybrid.wire import calls, group
from workers.failure import gather
from workers.joining.bootstrap import Cluster

SECONDS = 10.0
_CONNECT_SECONDS = 0.3
# What a library that trusts its peers might take for a length, and try to have so much memory.
HUGE = struct.pack("<Q", 1 << 62)


def listening_ports(cluster: Cluster) -> dict[str, list[int]]:
    """Every port that a role listens on."""
    pids = {"master": os.getpid()} | {str(role): member.pid for role, member in cluster.members.items()}
    ports = {}
    for name, pid in pids.items():
        connections = psutil.Process(pid).net_connections("inet")
        ports[name] = [c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN]
    return ports


def connected(ports: list[int]) -> list[int]:
    """Those ports that let a stranger in."""
    let_in = []
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for port in ports:
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
            selector.register(client, selectors.EVENT_WRITE, port)
        while events := selector.select(_CONNECT_SECONDS):
            for key, _ in events:
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                selector.unregister(sock)
                if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    let_in.append(key.data)
    return let_in


def vitals(cluster: Cluster) -> int:
    """How many roles answer."""
    return len(gather([wire.ping(role, SECONDS) for role in cluster.topology.roles]))


def test_once_a_cluster_runs_no_port_of_rpc_lets_anybody_in(clusters: Clusters) -> None:
    """But that of the rendezvous, which asks for the secret."""
    cluster = clusters.get(2, 2)
    ports = cluster.run(listening_ports)
    assert all(ports.values())
    let_in = {name: connected(of_role) for name, of_role in ports.items()}
    assert len(let_in.pop("master")) <= 1
    assert set(map(tuple, let_in.values())) == {()}
    assert cluster.run(vitals) == 5


def attack(address: str, payloads: list[bytes], mark: Path, told: Connection) -> None:
    """Join nothing, and speak torch's RPC with the process at ``address`` all the same."""
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    store = dist.HashStore()
    for key, value in {"names/0": "master", "addrs/master": address, "rpcIsStaticGroup": "true"}.items():
        store.set(key, value)
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], rpc_timeout=SECONDS)
    agent = rpc.TensorPipeAgent(store, "stranger", 1, 2, options, {}, [])
    torch.distributed.autograd._init(1)
    api._init_rpc_states(agent)
    victim = agent.get_worker_info("master")

    def send(payload: Any) -> Any:
        return rpc._invoke_rpc_python_udf(victim, payload, [], SECONDS, False).wait()

    attempts: list[Callable[[], Any]] = [
        lambda: rpc.rpc_sync("master", os.mkdir, args=(str(mark),)),
        lambda: rpc.remote("master", os.mkdir, args=(str(mark),)).to_here(timeout=SECONDS),
        lambda: rpc.rpc_sync("master", len, args=(torch.zeros(1 << 20),)),
        lambda: rpc.rpc_sync("master", len, args=(torch.zeros(1).expand(1 << 40),)),
        lambda: rpc.rpc_sync("master", len, args=(torch.eye(2).to_sparse(),)),
        *(lambda payload=payload: send(payload) for payload in payloads),
    ]
    told.send([_outcome(attempt) for attempt in attempts])
    os._exit(0)


def _outcome(attempt: Callable[[], Any]) -> str:
    try:
        return f"answered {attempt()}"
    except Exception as error:  # what the stranger sees
        return f"{type(error).__name__}: {error}"


@contextmanager
def open_process() -> Iterator[str]:
    """This process, in an RPC group of one, with its sockets still open; gives its address."""
    store = dist.HashStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "sealed_after", nullcontext)
        wire.start(
            MASTER,
            Topology(0, 0),
            store,
            secret=Secret.fresh(),
            run_id=b"run",
            interface="lo",
            transport="uv",
            timeout_seconds=SECONDS,
        )
    try:
        (key,) = [key for key in store.list_keys() if key.endswith("addrs/master")]
        yield store.get(key).decode()
    finally:
        wire.stop(SECONDS, graceful=False)


def recorded_call() -> bytes:
    """A call of this process to itself that has arrived, as it would go over the network."""
    pickler = internal._internal_rpc_pickler
    assert isinstance(pickler, SignedPickler)
    with addressed_to("master"):
        payload, _ = pickler.serialize(internal.PythonUDF(calls.vitals, (), {}))
    assert not isinstance(pickler.deserialize(payload, []), internal.RemoteException)
    return payload


def test_while_a_port_is_open_no_call_of_a_stranger_is_loaded(tmp_path: Path) -> None:
    """Not a pickle that runs code, nor a call that was heard, nor one changed, nor nonsense."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    with open_process() as address:
        pickler = internal._internal_rpc_pickler
        assert isinstance(pickler, SignedPickler)
        heard = recorded_call()
        payloads = [heard, heard[:-1] + bytes([heard[-1] ^ 1]), heard[:40], b"", os.urandom(1000), HUGE * 100]
        stranger = context.Process(target=attack, args=(address, payloads, tmp_path / "mark", theirs))
        memory = psutil.Process().memory_info().rss
        stranger.start()
        try:
            assert ours.poll(STOP_SECONDS)
            outcomes = ours.recv()
        finally:
            stranger.kill()
            stranger.join(STOP_SECONDS)
        # It learns nothing but that it was not answered.
        assert {outcome.partition(":")[0] for outcome in outcomes} <= {"RuntimeError", "EOFError"}
        assert len(outcomes) == 5 + len(payloads)
        assert not any(REFUSED in outcome for outcome in outcomes)
        assert pickler._refusals.count == len(outcomes)
        assert wire.ping(MASTER, SECONDS).wait().pid == os.getpid()
        assert psutil.Process().memory_info().rss - memory < 64 << 20
    assert not (tmp_path / "mark").exists()
    assert not any(
        isinstance(each, SignedPickler) for each in (internal._internal_rpc_pickler, api._default_pickler)
    )

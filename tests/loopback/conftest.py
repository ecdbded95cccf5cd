"""RPC of a process with itself: the cheapest tier that has real messages and distributed autograd."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from support.socket_ends import connection, rpc_of_one

from hybrid.topology import MASTER
from hybrid.transport import endpoints
from hybrid.transport.endpoints import SOCKET_CALLS
from hybrid.transport.socket.socket_calls import SocketClient, SocketServer


@pytest.fixture(scope="module")
def loopback() -> Iterator[None]:
    """An RPC group of one, and a process group of one for DDP."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=dist.PrefixStore("trainers", store), rank=0, world_size=1)
    with rpc_of_one(store):
        calling, serving = connection()
        endpoints.running.clients[MASTER] = SocketClient(calling, 5.0)
        endpoints.running.servers = [SocketServer(serving, SOCKET_CALLS)]
        yield
    dist.destroy_process_group()

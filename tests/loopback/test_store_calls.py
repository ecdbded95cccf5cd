"""What torch asks of a store that is written in Python: the cluster's has that, and no more is needed."""

import os

import torch
import torch.distributed as dist
from support.rendezvous import SECONDS, Meeting, meeting

from hybrid import transport
from hybrid.topology import MASTER, Topology
from workers.rendezvous.rendezvous_store import RendezvousStore


class Noted(RendezvousStore):
    """Notes what it is asked."""

    def __init__(self, opened: Meeting) -> None:
        super().__init__(opened.channel, SECONDS)
        self.asked: set[str] = set()

    def _request(self, *question: str | bytes, seconds: float = 0.0) -> bytes:
        self.asked.add(str(question[0]))
        return super()._request(*question, seconds=seconds)


def test_torch_uses_five_operations_of_the_store() -> None:
    """A release of torch that asks others, such as for the extended calls, shows here."""
    with meeting() as opened:
        store = Noted(opened)
        dist.init_process_group("gloo", store=dist.PrefixStore("trainers", store), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        dist.new_group([0])
        transport.start(
            MASTER,
            Topology(0, 0),
            dist.PrefixStore("rpc", store),
            secret=opened.secret,
            run_id=os.urandom(16),
            interface="lo",
            timeout_seconds=SECONDS,
        )
        transport.stop(SECONDS)
        dist.destroy_process_group()
        store.close()
    assert store.asked <= {"set", "get", "wait", "add", "compare_set"}
    assert {"set", "get", "add"} <= store.asked

"""What the processes of a cluster listen on."""

from __future__ import annotations

import psutil
from support.cluster import Clusters

from workers.joining.bootstrap import Cluster


def listening_addresses(cluster: Cluster) -> dict[str, set[str]]:
    """The addresses on which each role listens, the master first."""
    pids = {"master": psutil.Process().pid} | {str(role): m.pid for role, m in cluster.members.items()}
    return {
        name: {
            connection.laddr.ip
            for connection in psutil.Process(pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        for name, pid in pids.items()
    }


def test_every_role_listens_on_loopback_only(clusters: Clusters) -> None:
    """Left to itself, torch's rendezvous store would listen on every interface."""
    addresses = clusters.get(2, 2).run(listening_addresses)
    assert list(addresses) == ["master", "trainer 0", "trainer 1", "worker 0", "worker 1"]
    assert all(addresses.values())
    assert set().union(*addresses.values()) <= {"127.0.0.1", "::1"}

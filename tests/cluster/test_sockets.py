"""Sockets of the processes of a cluster."""

import psutil
from support.cluster import Clusters

from workers.rendezvous.bootstrap import JoinedCluster


def pids_of(cluster: JoinedCluster) -> dict[str, int]:
    """Return the process of each role, the master first."""
    return {"master": psutil.Process().pid} | {str(role): m.pid for role, m in cluster.members.items()}


def addresses(cluster: JoinedCluster) -> dict[str, tuple[set[str], int]]:
    """Return addresses and number of listening sockets of each role, the master first."""
    found = {}
    for name, pid in pids_of(cluster).items():
        connections = psutil.Process(pid).net_connections("inet")
        listening = [each for each in connections if each.status == psutil.CONN_LISTEN]
        found[name] = {each.laddr.ip for each in connections}, len(listening)
    return found


def test_roles_use_loopback_and_only_the_rendezvous_listens(clusters: Clusters) -> None:
    """By default, torch listens on a dozen ports per role, and on every interface for its store."""
    found = clusters.get(2, 2).run(addresses)
    assert {name: listening for name, (_, listening) in found.items()} == {
        "master": 1,
        **dict.fromkeys(["trainer 0", "trainer 1", "worker 0", "worker 1"], 0),
    }
    for of_role, _ in found.values():
        assert of_role
        assert of_role <= {"127.0.0.1", "::1"}

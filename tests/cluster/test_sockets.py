"""What the processes of a cluster are connected by, and listen on."""

import psutil
from support.cluster import Clusters

from workers.joining.bootstrap import Cluster


def addresses(cluster: Cluster) -> dict[str, tuple[set[str], int]]:
    """The addresses of each role's sockets, and how many of these listen; the master first."""
    pids = {"master": psutil.Process().pid} | {str(role): m.pid for role, m in cluster.members.items()}
    found = {}
    for name, pid in pids.items():
        connections = psutil.Process(pid).net_connections("inet")
        listening = [each for each in connections if each.status == psutil.CONN_LISTEN]
        found[name] = {each.laddr.ip for each in connections}, len(listening)
    return found


def test_every_role_is_on_loopback_only_and_only_the_rendezvous_listens(clusters: Clusters) -> None:
    """Left to itself, torch would listen on a dozen ports a role, and on every interface for its store."""
    found = clusters.get(2, 2).run(addresses)
    assert {name: listening for name, (_, listening) in found.items()} == {
        "master": 1,
        **dict.fromkeys(["trainer 0", "trainer 1", "worker 0", "worker 1"], 0),
    }
    for of_role, _ in found.values():
        assert of_role
        assert of_role <= {"127.0.0.1", "::1"}

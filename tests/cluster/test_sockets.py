"""What the processes of a cluster are connected by, and listen on."""

from collections import Counter
from collections.abc import Mapping

import psutil
from support.cluster import Clusters, running_cluster, small_config

from hybrid import transport
from hybrid.transport import Vitals
from workers.rendezvous.bootstrap import JoinedCluster
from workers.rendezvous.host_requirements import files_needed

# Eight run calls of RPC; the others are torch's loops, heartbeats, the rendezvous, readers of sockets.
MOST_THREADS = 22


def pids_of(cluster: JoinedCluster) -> dict[str, int]:
    """The process of each role, the master first."""
    return {"master": psutil.Process().pid} | {str(role): m.pid for role, m in cluster.members.items()}


def addresses(cluster: JoinedCluster) -> dict[str, tuple[set[str], int]]:
    """The addresses of each role's sockets, and how many of these listen; the master first."""
    found = {}
    for name, pid in pids_of(cluster).items():
        connections = psutil.Process(pid).net_connections("inet")
        listening = [each for each in connections if each.status == psutil.CONN_LISTEN]
        found[name] = {each.laddr.ip for each in connections}, len(listening)
    return found


def test_roles_use_loopback_and_only_the_rendezvous_listens(clusters: Clusters) -> None:
    """Left to itself, torch would listen on a dozen ports a role, and on every interface for its store."""
    found = clusters.get(2, 2).run(addresses)
    assert {name: listening for name, (_, listening) in found.items()} == {
        "master": 1,
        **dict.fromkeys(["trainer 0", "trainer 1", "worker 0", "worker 1"], 0),
    }
    for of_role, _ in found.values():
        assert of_role
        assert of_role <= {"127.0.0.1", "::1"}


def connections(cluster: JoinedCluster) -> Mapping[tuple[str, str], int]:
    """How many connections each pair of roles has, by their names in order."""
    ends = {}
    for name, pid in pids_of(cluster).items():
        for each in psutil.Process(pid).net_connections("inet"):
            if each.status == psutil.CONN_ESTABLISHED:
                ends[each.laddr.port, each.raddr.port] = name
    pairs = Counter(
        (name, ends[there, here]) for (here, there), name in ends.items() if (there, here) in ends
    )
    return {pair: count for pair, count in pairs.items() if pair[0] < pair[1]}


def test_only_roles_that_talk_to_each_other_are_connected(clusters: Clusters) -> None:
    found = clusters.get(2, 2).run(connections)
    roles = ["trainer 0", "trainer 1", "worker 0", "worker 1"]
    of_rpc = {*(("master", role) for role in roles), *((t, w) for t in roles[:2] for w in roles[2:])}
    assert found.keys() == {*of_rpc, ("trainer 0", "trainer 1")}
    # Three for each that may call the other; more belong to the rendezvous and the socket transport.
    assert min(found[pair] for pair in of_rpc) >= 6
    assert found["trainer 0", "trainer 1"] == 1  # in which gradients are reduced


def vitals(cluster: JoinedCluster) -> list[Vitals]:
    """What each role says of itself."""
    return transport.gather([transport.ping(role, 10.0) for role in cluster.topology.roles])


def test_a_role_has_few_open_files_and_threads() -> None:
    """With the channels that torch would take by itself, it is two or three times as many."""
    config = small_config(cluster={"trainers": 3, "workers": 3})
    with running_cluster(config) as cluster:
        found = cluster.run(vitals)
    most = max(each.open_files for each in found)
    assert 0.3 * files_needed(config.cluster) < most < files_needed(config.cluster)
    assert max(each.threads for each in found) <= MOST_THREADS

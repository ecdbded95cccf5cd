"""How hosts are named with their roles."""

from workers.rendezvous.membership import Presence, name_hosts


def on(host: str, address: str, role: str) -> Presence:
    return Presence(role, host, 7, address, is_here=False)


def test_each_host_is_named_once_with_its_roles() -> None:
    found = [
        on("b", "10.0.0.2", "worker 1"),
        on("c", "10.0.0.3", "worker 0"),
        on("b", "10.0.0.2", "trainer 1"),
    ]
    assert name_hosts(found) == "host b (trainer 1, worker 1) and host c (worker 0)"
    assert str(found[0]) == "worker 1 (host b, pid 7)"


def test_hosts_of_one_name_are_two() -> None:
    found = [on("localhost", "10.0.0.2", "worker 1"), on("localhost", "10.0.0.3", "worker 0")]
    assert name_hosts(found) == "host localhost (worker 1) and host localhost (worker 0)"

"""Ranks and names of roles, and the transport between them."""

import pytest

from hybrid.topology import MASTER, Role, RoleKind, Topology


class TestTopology:
    def test_ranks_are_master_then_trainers_then_workers(self) -> None:
        topology = Topology(num_trainers=2, num_workers=3)
        assert topology.world_size == 6
        assert [str(r) for r in topology.roles] == [
            "master", "trainer 0", "trainer 1", "worker 0", "worker 1", "worker 2",
        ]  # fmt: skip
        assert [topology.rank(r) for r in topology.roles] == list(range(6))
        assert topology.roles == (MASTER, *topology.trainers, *topology.workers)

    def test_rpc_names_are_distinct(self) -> None:
        roles = Topology(12, 12).roles
        assert len({r.rpc_name for r in roles}) == len(roles)
        assert (MASTER.rpc_name, Role(RoleKind.TRAINER, 1).rpc_name) == ("master", "trainer1")

    def test_who_talks_by_rpc(self) -> None:
        topology = Topology(num_trainers=2, num_workers=3)
        partners = {str(role): " ".join(map(str, topology.partners(role))) for role in topology.roles}
        of_trainers = "master worker 0 worker 1 worker 2"
        of_workers = "master trainer 0 trainer 1"
        assert partners == {
            "master": "master trainer 0 trainer 1 worker 0 worker 1 worker 2",
            **dict.fromkeys(["trainer 0", "trainer 1"], of_trainers),
            **dict.fromkeys(["worker 0", "worker 1", "worker 2"], of_workers),
        }

    def test_a_role_beyond_the_cluster_has_no_rank(self) -> None:
        with pytest.raises(ValueError, match=r"^trainer 2 is not in a cluster of 1 master, 2 trainer\(s\)"):
            Topology(2, 1).rank(Role(RoleKind.TRAINER, 2))

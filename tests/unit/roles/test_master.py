"""What the master knows of where the others are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from hybrid.config import RunConfig
from hybrid.errors import ClusterError
from hybrid.security.secret import Secret
from hybrid.topology import MASTER, Role, RoleKind, Topology
from workers.cluster_task import FunctionTask
from workers.controller.shared_folders import own_files
from workers.rendezvous.bootstrap import Cluster, Member
from workers.rendezvous.interrupt import LostRoleError
from workers.rendezvous.master_address import listen
from workers.roles import master
from workers.roles.master import _Preparation, _reach


def test_who_sees_other_files_is_elsewhere_whatever_the_name_of_its_host() -> None:
    beside, elsewhere = Role(RoleKind.TRAINER), Role(RoleKind.WORKER)
    members = {
        beside: Member("a", 1, own_files(), "network"),
        elsewhere: Member("a", 2, "of a container", "network"),
    }
    cluster = Cluster(MASTER, Topology(1, 1), cast(Any, None), members)
    assert _reach(cluster).elsewhere == [elsewhere]


def test_a_preparation_that_is_abandoned_is_ended_as_by_a_lost_cluster() -> None:
    """So that its parts remain."""
    abandoned = _Preparation(RunConfig(), cast(Any, None), is_wanted=False)
    with pytest.raises(ClusterError, match="abandoned"):
        abandoned._check()


def refuse(topology: Topology, config: RunConfig) -> None:
    raise ValueError("the first error")


def test_a_role_lost_at_the_end_does_not_hide_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def lead(*_: object) -> Iterator[Cluster]:
        yield Cluster(MASTER, Topology(0, 0), cast(Any, None), {})

    def announce_stop(*_: object) -> None:
        raise LostRoleError("lost worker 0")

    monkeypatch.setattr(master, "lead", lead)
    monkeypatch.setattr(master, "announce_stop", announce_stop)
    with pytest.raises(ValueError, match="the first error"):
        master.run(RunConfig(), FunctionTask(f"{__name__}:refuse"), Secret.fresh(), listen("127.0.0.1", 0))

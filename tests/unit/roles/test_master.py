"""What the master knows of where the others are."""

from typing import Any, cast

from hybrid.topology import MASTER, Role, RoleKind, Topology
from workers.joining.bootstrap import Cluster, Member
from workers.roles.master import _reach
from workers.session.reach import own_files


def test_who_sees_other_files_is_elsewhere_whatever_the_name_of_its_host() -> None:
    beside, elsewhere = Role(RoleKind.TRAINER), Role(RoleKind.WORKER)
    members = {
        beside: Member("a", 1, own_files(), "network"),
        elsewhere: Member("a", 2, "of a container", "network"),
    }
    cluster = Cluster(MASTER, Topology(1, 1), cast(Any, None), members)
    assert _reach(cluster).elsewhere == [elsewhere]

"""What the master knows of where the others are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from hybrid.config import RunConfig
from hybrid.errors import ClusterError
from hybrid.security.secret import Secret
from hybrid.topology import MASTER, Topology
from workers.cluster_task import FunctionTask
from workers.rendezvous.bootstrap import Cluster
from workers.rendezvous.interrupt import LostRoleError
from workers.rendezvous.master_address import listen
from workers.roles import master
from workers.roles.master import _Preparation


def test_a_preparation_that_is_abandoned_is_ended_as_by_a_lost_cluster() -> None:
    """So that its parts remain."""
    abandoned = _Preparation(RunConfig(), cast(Any, None), starts_now=False)
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

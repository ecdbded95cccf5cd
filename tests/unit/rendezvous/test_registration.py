"""Who is given a place in a cluster, and what the others are told, and their master."""

import dataclasses
import sys
from importlib import metadata

import pytest
from support.commands import eventually
from support.rendezvous import ACCEPTANCE, SECONDS, TOPOLOGY, WORKER, meeting

from hybrid.config import ColumnSection, RunConfig
from hybrid.config.loading import to_toml
from hybrid.errors import ClusterError, HybridError
from hybrid.topology import Role, RoleKind
from workers.rendezvous.heartbeat import Acceptance, Registration, RegistrationPolicy, own_versions, register
from workers.rendezvous.secure_channel import LARGEST_FRAME

REGISTRATION = Registration.of(WORKER)


@pytest.fixture
def failed() -> list[HybridError]:
    """What the master is told."""
    return []


@pytest.fixture
def policy(failed: list[HybridError]) -> RegistrationPolicy:
    return RegistrationPolicy(TOPOLOGY, ACCEPTANCE, failed.append)


def test_the_configuration_of_many_columns_fits_into_a_message() -> None:
    columns = {f"feature_{i * 7919 % 100_003}": ColumnSection(kind="buckets") for i in range(20_000)}
    text = to_toml(RunConfig(columns=columns))
    assert len(text) > LARGEST_FRAME
    assert len(Acceptance(text, "a", "b", "c").packed()) < LARGEST_FRAME / 2


@pytest.mark.parametrize("name", ["trainer 2", "worker 02", "master", "bystander 0", ""])
def test_unknown_roles_are_rejected(name: str, policy: RegistrationPolicy, failed: list[HybridError]) -> None:
    registration = dataclasses.replace(REGISTRATION, role=name)
    rule = f"there is no {name} in a cluster of 1 master, 2 trainer(s), 2 worker(s)"
    assert policy.rejection_reason(registration) == rule
    assert failed == []


@pytest.mark.parametrize("name", ["hybrid-parallel", "torch", "Python"])
def test_another_version_is_reported_on_both_sides(
    name: str, policy: RegistrationPolicy, failed: list[HybridError]
) -> None:
    registration = dataclasses.replace(REGISTRATION, host="b", versions={**own_versions(), name: "1.0"})
    why = (
        f"worker 0 on host b has {name} 1.0, the master on host there {own_versions()[name]}; install "
        "the same on both"
    )
    assert policy.rejection_reason(registration) == why
    assert [str(error) for error in failed] == [why]


def test_builds_for_other_devices_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = own_versions()
    assert versions["Python"] == ".".join(map(str, sys.version_info[:2]))
    for build in ("", "+cpu", "+cu128"):
        monkeypatch.setattr(metadata, "version", lambda _, build=build: f"2.13.0{build}")
        assert own_versions()["torch"] == "2.13.0"


def test_a_second_registration_does_not_end_the_run() -> None:
    with meeting() as opened, opened.pulse(), opened.store() as store:
        late = opened.channel()
        with pytest.raises(ClusterError, match=r"^worker 0 is already taken in this cluster"):
            register(late, dataclasses.replace(REGISTRATION, versions={}))
        late.close()
        assert store.check(["twice/worker 0"])
        assert (opened.lost, opened.heard) == ([], [])


def test_a_role_gets_an_acceptance_or_a_reason() -> None:
    with meeting() as opened:
        channel = opened.channel()
        assert register(channel, REGISTRATION) == ACCEPTANCE
        for registration, words in (
            (Registration.of(Role(RoleKind.WORKER, 7)), "^there is no worker 7 in a cluster of "),
            (
                dataclasses.replace(Registration.of(Role(RoleKind.WORKER, 1)), versions={}),
                "has Python none, the master",
            ),
        ):
            refused = opened.channel()
            with pytest.raises(HybridError, match=words):
                register(refused, registration)
            refused.close()
        assert [str(error) for error in opened.lost] == [f"{opened.lost[0]!s}"]
        assert "worker 1 on host" in str(opened.lost[0])
        channel.close()
        assert eventually(lambda: len(opened.lost) == 2, SECONDS)

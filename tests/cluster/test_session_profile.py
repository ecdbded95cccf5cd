"""The profile of a session's steps, for those who drive a session of their own."""

import time
from pathlib import Path

import pytest
from support.cluster import Clusters, small_config
from support.jobs import opened
from support.traces import arrows, slices

from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.errors import ConfigError
from workers.controller.session import DatasetSession
from workers.rendezvous.bootstrap import Cluster
from workers.step_profile import Profile

FIRST, STEPS, TAKEN = 2, 3, 6
PROFILE = {"steps": (STEPS, FIRST)}


def refusal(session: DatasetSession) -> str:
    with pytest.raises(ConfigError) as caught:
        session.take_profile()
    return str(caught.value)


def profiled(
    cluster: Cluster, config: RunConfig, cache: Path, scratch: Path
) -> tuple[list[str], list[Profile], int]:
    """Train, and go on in another session.

    Returns:
        the refusals before and after the first profile, the profiles of both sessions, and when the
        first had taken its steps.
    """
    with opened(cluster, config, cache) as session:
        refusals = [refusal(session)]
        session.train(0, 0, TAKEN, 0)
        trained_ns = time.time_ns()
        session.evaluate(FIRST)  # lookups of the same number are no part of that step
        profiles = [session.take_profile()]
        refusals.append(refusal(session))
        folder = session.save(scratch / "step", TAKEN, 0)
    with opened(cluster, config, cache) as session:
        session.load(Checkpoint.open(folder))
        session.train(0, TAKEN, FIRST + STEPS, TAKEN)
        profiles.append(session.take_profile())
    return refusals, profiles, trained_ns


@pytest.mark.parametrize("mode", ["sync", "pipelined", "async"])
def test_a_session_gives_the_profile_of_its_steps(
    mode: str, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    config = small_config(train={"update": mode, "micro_batches": 2}, profile=PROFILE)
    refusals, profiles, trained_ns = clusters.get(2, 2).run(profiled, config, cache, tmp_path)
    message = f"profile.steps = ({STEPS}, {FIRST}): none of these steps has been taken"
    assert refusals == [message, message]
    again = TAKEN + FIRST
    assert [profile.steps for profile in profiles] == [[2, 3, 4], [again, again + 1, again + 2]]
    if mode == "sync":  # the updates of the others' last steps may be later
        assert all(p.span.end_ns <= trained_ns for placed in profiles[0].placed.values() for p in placed)
    for profile in profiles:
        by_role = slices(profile.trace())
        arrows(profile.trace())
        assert [str(role) for role in profile.placed] == list(by_role)
        assert all(by_role.values())
        for role in profile.placed:
            rows = {row.path: row for row in profile.rows(role)}
            if role.kind == "trainer":
                assert rows["step",].count == rows["step", "update"].count == 1
                assert rows["step", "backward"].count == rows["step", "dense", "head"].count == 2
                assert rows["all-reduce",].count == 1  # with the last of the micro-batches
                assert rows["all-reduce",].num_bytes > 0

"""The role of a process by the variables of schedulers; nothing is guessed."""

import re

import pytest

from hybrid.errors import ConfigError
from hybrid.topology import RoleKind, Topology
from workers.launching.scheduler_rank import ends_with_starter, index_of, master_host, role_of

TOPOLOGY = Topology(2, 2)
NAMES = ["master", "trainer 0", "trainer 1", "worker 0", "worker 1"]


def of_torchrun(rank: int, size: int = 5) -> dict[str, str]:
    """Return the variables that agents of torchrun set."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": "a",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "1",
    }


def of_srun(rank: int, size: int = 5) -> dict[str, str]:
    """Return the variables that srun sets for a task."""
    return {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize("tell", [of_torchrun, of_srun, lambda rank: {**of_srun(rank), **of_torchrun(rank)}])
def test_ranks_are_roles(tell: object) -> None:
    assert callable(tell)
    assert [str(role_of(tell(rank), TOPOLOGY)) for rank in range(5)] == NAMES


def test_what_an_agent_of_torchrun_says_is_of_this_process_and_what_srun_says_of_the_agent() -> None:
    assert str(role_of({**of_srun(0, 2), **of_torchrun(3)}, TOPOLOGY)) == "worker 0"


BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "5", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "needs RANK and WORLD_SIZE"),
        (BATCH, "none is set"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            r"say 0 of 2, but 1 master, .* are 5 processes",
        ),
        (of_torchrun(0, 6), "say 0 of 6"),
        (of_torchrun(5), "say 5 of 5"),
        (of_srun(0, 3), "SLURM_PROCID and SLURM_STEP_NUM_TASKS say 0 of 3"),
        (
            {**of_srun(1), "RANK": "0", "WORLD_SIZE": "5"},
            "RANK and WORLD_SIZE say 0 of 5 but SLURM_PROCID and SLURM_STEP_NUM_TASKS say 1 of 5",
        ),
    ],
    ids=["nothing", "a batch script", "half", "a node", "one too many", "beyond", "srun of others", "both"],
)
def test_it_never_guesses(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^role: .*{said}.* hybrid master") as refused:
        role_of(environment, TOPOLOGY)
    assert "\n" not in str(refused.value)


def test_a_rank_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match=re.escape("RANK = 'first': must be an integer")):
        role_of({"RANK": "first", "WORLD_SIZE": "5"}, TOPOLOGY)


def test_the_index_of_an_indexed_job() -> None:
    assert index_of({"JOB_COMPLETION_INDEX": "3"}, RoleKind.WORKER) == 3
    with pytest.raises(ConfigError, match=r"^--index: must be given: .* worker"):
        index_of({}, RoleKind.WORKER)


def test_the_masters_host_is_rank_0s_under_torchrun_alone() -> None:
    assert master_host(of_torchrun(3)) == "node0"
    assert master_host({"MASTER_ADDR": "elsewhere"}) == ""


@pytest.mark.parametrize(
    ("environment", "ends"), [(of_torchrun(0), True), (of_srun(0), True), (BATCH, False)]
)
def test_only_what_a_scheduler_starts_again_ends_with_its_starter(
    environment: dict[str, str], ends: bool
) -> None:
    assert ends_with_starter(environment) is ends

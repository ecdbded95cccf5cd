"""Arguments of commands, and the role of a process by the variables of schedulers."""

from pathlib import Path

import pytest

from hybrid.errors import ConfigError
from hybrid.topology import RoleKind, Topology
from workers.cli.arguments import parse
from workers.cli.commands import index_of, master_host, role_of
from workers.console import Verbosity

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


@pytest.mark.parametrize(
    "variables", [of_torchrun, of_srun, lambda rank: {**of_srun(0, 2), **of_torchrun(rank)}]
)
def test_ranks_are_roles(variables: object) -> None:
    assert callable(variables)
    assert [str(role_of(variables(rank), TOPOLOGY)) for rank in range(5)] == NAMES


BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "5", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "RANK and WORLD_SIZE"),
        (BATCH, "none is set"),
        ({"RANK": "0"}, "WORLD_SIZE "),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "0 of 2, but .* 5 processes"),
        (of_torchrun(0, 6), "0 of 6"),
        (of_torchrun(5), "5 of 5"),
        (of_srun(0, 3), "SLURM_PROCID .* 0 of 3"),
        ({**of_srun(1), "RANK": "0", "WORLD_SIZE": "5"}, "RANK .* 0 of 5 .* SLURM_PROCID .* 1 of 5"),
    ],
    ids=["nothing", "a batch script", "half", "a node", "one too many", "beyond", "srun of others", "both"],
)
def test_missing_or_contradictory_ranks_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^role: .*{message}.* hybrid master") as refused:
        role_of(environment, TOPOLOGY)
    assert "\n" not in str(refused.value)


def test_rank_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match="RANK = 'first': "):
        role_of({"RANK": "first", "WORLD_SIZE": "5"}, TOPOLOGY)


def test_index_of_an_indexed_job() -> None:
    assert index_of({"JOB_COMPLETION_INDEX": "3"}, RoleKind.WORKER) == 3
    with pytest.raises(ConfigError, match=r"^--index: .* worker"):
        index_of({}, RoleKind.WORKER)


def test_master_host_is_given_by_torchrun_only() -> None:
    assert master_host(of_torchrun(3)) == "node0"
    assert master_host({"MASTER_ADDR": "other"}) == ""


@pytest.mark.parametrize("arguments", [["RUN", "--input", "a"], ["--input", "a", "--output", "o", "RUN"]])
def test_run_and_input_in_any_order(arguments: list[str]) -> None:
    options = parse(["predict", *arguments])
    assert (options.run_folder, options.input) == (Path("RUN"), ["a"])


def test_a_run_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["evaluate", "--input", "a", "RUN"])  # an option of several values takes all that follow it
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith("the following arguments are required: RUN\n")


@pytest.mark.parametrize(
    ("arguments", "verbosity"),
    [
        (["launch"], Verbosity.NORMAL),
        (["launch", "-q"], Verbosity.QUIET),
        (["--quiet", "launch"], Verbosity.QUIET),
        (["-v", "launch"], Verbosity.VERBOSE),
        (["launch", "--verbose"], Verbosity.VERBOSE),
        (["-v", "run", "script.py", "--", "-q"], Verbosity.VERBOSE),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_verbosity_may_come_before_or_after_the_command(arguments: list[str], verbosity: Verbosity) -> None:
    assert parse(arguments).verbosity is verbosity

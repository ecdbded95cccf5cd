"""The role of a process that torchrun, Slurm or Kubernetes has started, by its environment variables."""

import os
from collections.abc import Mapping

from hybrid.errors import ConfigError
from hybrid.topology import Role, RoleKind, Topology
from workers.launching.fork_server import end_with_parent

TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by agents of torchrun for their processes
SLURM_STEP = "SLURM_STEP_ID"  # set by srun for its processes
_INDEX = "JOB_COMPLETION_INDEX"  # set by Kubernetes in the pods of an indexed job
_BY_HAND = "start each role by its own command: hybrid master, hybrid trainer, hybrid worker"


def role_of(environment: Mapping[str, str], topology: Topology) -> Role:
    """Return the role of a process by its rank: 0 is the master, then trainers, then workers.

    Missing or contradictory variables are refused: some platforms set RANK and WORLD_SIZE once per node, and
    a guess would start half a cluster.

    Raises:
        ConfigError: the rank is missing or ambiguous, or the number of processes is not the topology's.
    """
    ranks: dict[str, tuple[int, int]] = {}
    if "RANK" in environment:
        ranks["RANK and WORLD_SIZE"] = _integer(environment, "RANK"), _integer(environment, "WORLD_SIZE")
    if SLURM_STEP in environment and TORCHRUN not in environment:
        size = _integer(environment, "SLURM_STEP_NUM_TASKS")
        ranks["SLURM_PROCID and SLURM_STEP_NUM_TASKS"] = _integer(environment, "SLURM_PROCID"), size
    if not ranks:
        rule = f"needs RANK and WORLD_SIZE, or SLURM_PROCID of srun, and none is set; {_BY_HAND}"
        raise ConfigError("role", rule)
    found = " but ".join(f"{names} say {rank} of {size}" for names, (rank, size) in ranks.items())
    if len(set(ranks.values())) > 1:
        raise ConfigError("role", f"{found}; {_BY_HAND}")
    rank, size = next(iter(ranks.values()))
    if size != topology.world_size or not 0 <= rank < size:
        rule = (
            f"{found}, but {topology} are {topology.world_size} processes (some platforms, such as PAI-DLC "
            f"and Baidu's, set RANK once per node); {_BY_HAND}"
        )
        raise ConfigError("role", rule)
    return topology.roles[rank]


def index_of(environment: Mapping[str, str], kind: RoleKind) -> int:
    """Return the index of a trainer or worker for which ``--index`` is not given."""
    if _INDEX not in environment:
        rule = f"must be given: the index of the {kind}, from 0 (Kubernetes sets {_INDEX} in indexed jobs)"
        raise ConfigError("--index", rule)
    return _integer(environment, _INDEX)


def _integer(environment: Mapping[str, str], name: str) -> int:
    if name not in environment:
        raise ConfigError("role", f"{name} is not set; {_BY_HAND}")
    try:
        return int(environment[name])
    except ValueError as error:
        raise ConfigError(name, "must be an integer", environment[name]) from error


def master_host(environment: Mapping[str, str]) -> str:
    """Return the host of rank 0 under torchrun, else an empty string; MASTER_PORT is torchrun's own port."""
    return environment.get("MASTER_ADDR", "") if TORCHRUN in environment else ""


def end_with_scheduler() -> None:
    """End this process with its parent if torchrun or srun, which restart all roles, is the parent."""
    if TORCHRUN in os.environ or SLURM_STEP in os.environ:
        end_with_parent(os.getppid())

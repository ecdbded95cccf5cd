"""Who a process is, of a job that starts one command many times: as schedulers tell it. Free of torch.

Nothing is guessed: one that is told nothing, or two things, or of another number of processes than the
cluster has, is refused. Some platforms set RANK and WORLD_SIZE once a node, and would start half a cluster.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hybrid.errors import ConfigError
from hybrid.topology import Role, RoleKind, Topology

TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by its agents, for what they start
SLURM_STEP = "SLURM_STEP_ID"  # set by srun, for what it starts
_INDEX = "JOB_COMPLETION_INDEX"  # set by Kubernetes in the pods of an indexed job
_BY_HAND = "start each role by a command of its own: hybrid master, hybrid trainer, hybrid worker"


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a process among those of its job, and the variables that tell it."""

    rank: int
    size: int
    told_by: str

    def __str__(self) -> str:
        return f"{self.told_by} say {self.rank} of {self.size}"


def role_of(environment: Mapping[str, str], topology: Topology) -> Role:
    """The role of a process by its rank: 0 is the master, then come the trainers, then the workers.

    Raises:
        ConfigError: its rank is not known for sure.
    """
    places = _places(environment)
    if not places:
        rule = f"needs RANK and WORLD_SIZE, or SLURM_PROCID of srun, and there are none; {_BY_HAND}"
        raise ConfigError("role", rule)
    if len({(place.rank, place.size) for place in places}) > 1:
        raise ConfigError("role", f"{' but '.join(map(str, places))}; {_BY_HAND}")
    place = places[0]
    if place.size != topology.world_size or not 0 <= place.rank < place.size:
        rule = (
            f"{place}, and {topology} are {topology.world_size} processes (some platforms, such as PAI-DLC "
            f"and Baidu's, set RANK once a node); {_BY_HAND}"
        )
        raise ConfigError("role", rule)
    return topology.roles[place.rank]


def _places(environment: Mapping[str, str]) -> list[_Place]:
    """What there is to go by. Who is started by an agent of torchrun need not look further."""
    found = []
    if "RANK" in environment:
        found.append(_place(environment, "RANK", "WORLD_SIZE"))
    if SLURM_STEP in environment and TORCHRUN not in environment:
        found.append(_place(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    return found


def _place(environment: Mapping[str, str], rank: str, size: str) -> _Place:
    number, count = (_number(environment, name, "role") for name in (rank, size))
    return _Place(number, count, f"{rank} and {size}")


def index_of(environment: Mapping[str, str], kind: RoleKind) -> int:
    """Which one of its kind a process is, where ``--index`` does not say it."""
    if _INDEX not in environment:
        rule = f"must be given: which {kind}, from 0 (or {_INDEX}, as indexed jobs of Kubernetes set it)"
        raise ConfigError("--index", rule)
    return _number(environment, _INDEX, "--index")


def _number(environment: Mapping[str, str], name: str, key: str) -> int:
    try:
        return int(environment[name])
    except KeyError as error:
        raise ConfigError(key, f"{name} is not set; {_BY_HAND}") from error
    except ValueError as error:
        raise ConfigError(name, "must be an integer", environment[name]) from error


def master_host(environment: Mapping[str, str]) -> str:
    """The host of rank 0 under torchrun; empty elsewhere. The port beside it is torchrun's own."""
    return environment.get("MASTER_ADDR", "") if TORCHRUN in environment else ""


def ends_with_starter(environment: Mapping[str, str]) -> bool:
    """Whether a process is to end with the one that has started it: an agent of torchrun's, or srun's.

    Such a one is started again, and with it all roles; of those started by hand nobody knows.
    """
    return TORCHRUN in environment or SLURM_STEP in environment

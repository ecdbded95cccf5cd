"""How many files a process may have open: as many as the system lets it, if a role can do with that."""

import resource

from hybrid.config import ClusterSection
from hybrid.errors import HybridError
from hybrid.topology import polls_shared_memory

# Measured with 5 to 41 roles (torch 2.13), and rounded up: what the master has open, who has the most,
# alone and for each other role. By shared memory a connection takes 18 more, and there are two.
_ALONE = 120
_FOR_EACH_OTHER, _FOR_EACH_OTHER_BY_SHARED_MEMORY = 9, 48


def files_needed(cluster: ClusterSection) -> int:
    """About how many files a role of this cluster has open at most."""
    size = cluster.topology.world_size
    each = _FOR_EACH_OTHER_BY_SHARED_MEMORY if polls_shared_memory(size) else _FOR_EACH_OTHER
    return _ALONE + each * (size - 1)


def allow_open_files(cluster: ClusterSection) -> None:
    """Let this process, and those that it will start, have open as many files as the system lets them.

    Raises:
        HybridError: that is less than a role needs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = files_needed(cluster)
    if resource.RLIM_INFINITY != hard < needed:
        raise HybridError(
            f"a role of {cluster.topology} needs about {needed} open files, and {hard} are allowed "
            "(ulimit -Hn); raise that, or start fewer roles"
        )

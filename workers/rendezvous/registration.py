"""What a role says of itself when it claims its place, and what the master answers. Free of torch.

The answer is "taken", "refused" with the reason, "over" where the run has come to its end, or "welcome" with
all that the role is to know: it has come with the master's address, the secret and its name, and nothing
else.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata

from hybrid import __version__
from hybrid.errors import HybridError
from hybrid.topology import MASTER, Role, Topology

LIFE = b"life"  # what the connection of a claim is for
TAKEN, REFUSED, OVER, WELCOME = b"taken", b"refused", b"over", b"welcome"


def own_versions() -> dict[str, str]:
    """What must be the same wherever a cluster has a role; builds of torch for other devices are."""
    torch, _, _ = metadata.version("torch").partition("+")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"hybrid-parallel": __version__, "torch": torch, "Python": python}


@dataclass(frozen=True, slots=True)
class Claim:
    """A role that wants its place.

    Attributes:
        role: its name, such as "worker 0".
        versions: as of :func:`own_versions`.
    """

    role: str
    host: str
    pid: int
    versions: Mapping[str, str]

    @classmethod
    def of(cls, role: Role) -> Claim:
        """This process's."""
        return cls(str(role), socket.gethostname(), os.getpid(), own_versions())

    def packed(self) -> bytes:
        """As it travels."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Claim:
        """What has travelled."""
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the master tells a role whose place this is.

    Attributes:
        config: the run's configuration, as TOML.
        host, network, interface: of the master: its name, what :func:`own_network` says there, and the
            interface by which it is reached.
    """

    config: str
    host: str
    network: str
    interface: str

    def packed(self) -> bytes:
        """As it travels: small, since a configuration has many keys for each of many columns."""
        return zlib.compress(json.dumps(dataclasses.asdict(self)).encode())

    @classmethod
    def unpacked(cls, data: bytes) -> Welcome:
        """What has travelled."""
        return cls(**json.loads(zlib.decompress(data)))


@dataclass(frozen=True, slots=True)
class Admission:
    """Answers claims, but for whether a place is taken.

    Attributes:
        welcome: for every role of the cluster.
        fail: called with the error of a claim that the cluster cannot start with.
        over: why nobody has anything to do, of a run that has come to its end; else empty.
    """

    topology: Topology
    welcome: Welcome
    fail: Callable[[HybridError], None]
    over: str = ""

    def refusal(self, claim: Claim) -> str | None:
        """Why a claim is refused; None where it is not."""
        if claim.role == str(MASTER) or claim.role not in map(str, self.topology.roles):
            return f"there is no {claim.role} in a cluster of {self.topology}"
        own = own_versions()
        for name in sorted(own.keys() | claim.versions.keys()):
            theirs, ours = claim.versions.get(name, "none"), own.get(name, "none")
            if theirs != ours:
                why = (
                    f"{claim.role} on host {claim.host} has {name} {theirs}, the master on host "
                    f"{self.welcome.host} {ours}; install the same on both"
                )
                self.fail(HybridError(why))
                return why
        return None

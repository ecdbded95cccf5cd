"""What a role sends to register, and the master's response. Free of torch.

A role starts with the master's address, the secret and its own name. The response is "taken", "rejected" with
the reason, "ended" if the run has ended, or "accepted" with everything else that the role needs.
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

HEARTBEATS = b"life"  # purpose of the connection over which a role registers
TAKEN, REJECTED, RUN_ENDED, ACCEPTED = b"taken", b"refused", b"over", b"welcome"


def own_versions() -> dict[str, str]:
    """Return the versions that all roles of a cluster share; torch's build for a device may differ."""
    torch, _, _ = metadata.version("torch").partition("+")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"hybrid-parallel": __version__, "torch": torch, "Python": python}


@dataclass(frozen=True, slots=True)
class Registration:
    """A role that registers.

    Attributes:
        role: its name, such as "worker 0".
        versions: see :func:`own_versions`.
    """

    role: str
    host: str
    pid: int
    versions: Mapping[str, str]

    @classmethod
    def of(cls, role: Role) -> Registration:
        """Return the registration of this process."""
        return cls(str(role), socket.gethostname(), os.getpid(), own_versions())

    def packed(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Registration:
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What an accepted role learns.

    Attributes:
        config: the run's configuration, as TOML.
        host, network, interface: of the master: its name, its :func:`own_network`, and its interface.
    """

    config: str
    host: str
    network: str
    interface: str

    def packed(self) -> bytes:
        """Return compressed bytes: a configuration may have many keys for each of many columns."""
        return zlib.compress(json.dumps(dataclasses.asdict(self)).encode())

    @classmethod
    def unpacked(cls, data: bytes) -> Acceptance:
        return cls(**json.loads(zlib.decompress(data)))


@dataclass(frozen=True, slots=True)
class RegistrationPolicy:
    """Decides whether a role may register; the server knows which ones are taken.

    Attributes:
        acceptance: response to every role of the cluster.
        on_mismatch: called with an error that prevents the cluster from starting.
        end_reason: of a run that has ended, else empty.
    """

    topology: Topology
    acceptance: Acceptance
    on_mismatch: Callable[[HybridError], None]
    end_reason: str = ""

    def rejection_reason(self, registration: Registration) -> str | None:
        """Return why a registration is rejected; None if it is not."""
        if registration.role == str(MASTER) or registration.role not in map(str, self.topology.roles):
            return f"there is no {registration.role} in a cluster of {self.topology}"
        own = own_versions()
        for name in sorted(own.keys() | registration.versions.keys()):
            theirs, ours = registration.versions.get(name, "none"), own.get(name, "none")
            if theirs != ours:
                reason = (
                    f"{registration.role} on host {registration.host} has {name} {theirs}, the master on "
                    f"host {self.acceptance.host} {ours}; install the same on both"
                )
                self.on_mismatch(HybridError(reason))
                return reason
        return None

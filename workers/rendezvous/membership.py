"""Who is there, as the master hears of them, and where: a host is named once, not each of its roles."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Presence:
    """A role that gives signs of life.

    Attributes:
        role: its name, such as "worker 0".
        host: its host's name, which others may have too.
        address: from which it has connected.
        is_here: whether it is on the master's host.
    """

    role: str
    host: str
    pid: int
    address: str
    is_here: bool

    @property
    def machine(self) -> tuple[str, str]:
        """The same for all roles of a host."""
        return self.host, self.address

    def __str__(self) -> str:
        return f"{self.role} (host {self.host}, pid {self.pid})"


def name_hosts(all_of_them: Iterable[Presence]) -> str:
    """Hosts by name, each with its roles: "host b (trainer 1, worker 1) and host c (worker 0)"."""
    roles: dict[tuple[str, str], list[str]] = {}
    for each in all_of_them:
        roles.setdefault(each.machine, []).append(each.role)
    return " and ".join(f"host {host} ({', '.join(sorted(names))})" for (host, _), names in roles.items())

"""Registration of a role, and heartbeats between it and the master. Free of torch.

A role starts with the master's address, the secret and its own name, and registers. The response is "taken",
"rejected" with the reason, "ended" if the run has ended, or "accepted" with everything else that the role
needs. The registration is the first heartbeat, so the master monitors every member from the start. Each role
has a thread that sends further heartbeats over the same connection; the response reports whether the run has
failed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from hybrid import __version__
from hybrid.errors import ClusterError, HybridError, first_line
from hybrid.topology import MASTER, Role, Topology
from workers.exit_codes import ExitCode, StopMessage, exit_code
from workers.rendezvous.interrupt import (
    EndedRoleError,
    LostHostError,
    LostRoleError,
    StoppedError,
    last_words,
)

if TYPE_CHECKING:  # which needs HeartbeatInterval
    from workers.rendezvous.secure_channel import Channel, MasterChannel

HEARTBEATS = b"life"  # purpose of the connection over which a role registers
TAKEN, REJECTED, RUN_ENDED, ACCEPTED = b"taken", b"refused", b"over", b"welcome"
_FEWEST_TURNS = 5
_FAREWELL_SECONDS = 1.0
_ALIVE, _SIGNALED, _FAREWELL, _MASTER_SILENT = b"alive", b"asked", b"farewell", b"unheard"
# The last heartbeats of roles whose host falls silent differ by at most so many turns.
_TURNS_APART = 2
# The connections of roles whose host ends break within this time.
_TOGETHER_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class HeartbeatInterval:
    """How often heartbeats are sent, and how many may be missing.

    Silence is counted in turns, each of which waits anew. So neither a clock that is set nor a time in which
    the local process was stopped looks like the silence of another process.

    Args:
        timeout_seconds: silence after which a process is considered frozen.
    """

    timeout_seconds: float

    @property
    def turns(self) -> int:
        """The number of turns, of at most one second, in the timeout."""
        return max(_FEWEST_TURNS, math.ceil(self.timeout_seconds))

    @property
    def turn_seconds(self) -> float:
        return self.timeout_seconds / self.turns

    @property
    def timeout(self) -> str:
        """The timeout and its key."""
        return f"{self.timeout_seconds:g} s (cluster.heartbeat_timeout_seconds)"

    def describe_frozen(self, who: str) -> str:
        """Return the message for a silent process whose host is alive."""
        return f"{who} is frozen: no heartbeat for {self.timeout}"

    def describe_unreachable(self, who: str, verb: str = "is") -> str:
        """Return the message for a silent process that may be frozen, gone or cut off."""
        return f"{who} {verb} unreachable: no heartbeat for {self.timeout}"


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


@dataclass(frozen=True, slots=True)
class ConnectedRole:
    """A role that sends heartbeats.

    Attributes:
        role: its name, such as "worker 0".
        host: name of its host; hosts may share a name.
        address: from which it connected.
        is_local: whether it is on the master's host.
    """

    role: str
    host: str
    pid: int
    address: str
    is_local: bool

    @property
    def machine(self) -> tuple[str, str]:
        """The same for all roles of a host."""
        return self.host, self.address

    def __str__(self) -> str:
        return f"{self.role} (host {self.host}, pid {self.pid})"


def name_hosts(roles: Iterable[ConnectedRole]) -> str:
    """Name each host once, with its roles: "host b (trainer 1, worker 1) and host c (worker 0)"."""
    by_machine: dict[tuple[str, str], list[str]] = {}
    for each in roles:
        by_machine.setdefault(each.machine, []).append(each.role)
    return " and ".join(
        f"host {host} ({', '.join(sorted(names))})" for (host, _), names in by_machine.items()
    )


def register(channel: Channel, registration: Registration) -> Acceptance:
    """Register a role over the connection of its heartbeats, which are due from then on.

    Raises:
        ClusterError: the role is registered already, or the master is gone or frozen.
        HybridError: the cluster has no such role, or other versions.
        StoppedError: the run has ended.
    """
    try:
        channel.send(HEARTBEATS, registration.packed())
        response, *more = channel.receive()
    except OSError as error:
        raise _master_is_gone(error) from error
    if response == TAKEN:
        raise ClusterError(f"{registration.role} is already taken in this cluster: was it started twice?")
    if response == REJECTED:
        raise HybridError(more[0].decode())
    if response == RUN_ENDED:
        raise StoppedError(more[0].decode(), ExitCode.DONE)
    return Acceptance.unpacked(more[0])


class HeartbeatSender:
    """Sends a role's heartbeats for the length of a ``with`` block.

    Args:
        channel: over which the role has registered; closed at the end.
        on_failure: called once if the master is gone or frozen, or the run has failed.
    """

    def __init__(self, channel: Channel, on_failure: Callable[[ClusterError], None]) -> None:
        self._channel = channel
        self._turn_seconds = channel.interval.turn_seconds
        self._on_failure = on_failure
        self._leaving = threading.Event()
        self._signal = b""
        self._last_words = [b"", b""]
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> HeartbeatSender:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, StoppedError):
            self._last_words = [last_words(error).encode(), b"%d" % exit_code(error)]
        self._leaving.set()
        self._thread.join(_FAREWELL_SECONDS)

    def forward_signal(self, number: int) -> None:
        """Report to the master that a signal asked this role to stop; called by the signal's handler."""
        self._signal = b"%d" % number

    def _run(self) -> None:
        try:
            text = b""
            while not text and not self._leaving.wait(self._turn_seconds):
                number, self._signal = self._signal, b""
                self._channel.send(*((_SIGNALED, number) if number else (_ALIVE,)))
                # The master was silent during the turn before the heartbeat, too.
                text = self._channel.receive(-self._turn_seconds)[0]
            if text:  # the run has failed
                word = StopMessage.parse(text.decode())
                self._on_failure(StoppedError(f"stopped by the master: {word.reason}", word.code))
                self._leaving.wait()
            self._channel.send(_FAREWELL, *self._last_words)
        except ClusterError as error:
            self._on_failure(error)
            with suppress(OSError, ClusterError):  # a master that was stopped receives it when it resumes
                self._channel.send(_MASTER_SILENT)
        except OSError as error:
            if not self._leaving.is_set():
                self._on_failure(_master_is_gone(error))
        finally:
            self._channel.close()


def _master_is_gone(error: OSError) -> StoppedError:
    return StoppedError(f"the master went away: {first_line(error)}")


class HeartbeatMonitor:
    """The master's side: knows the connected roles, and reports lost ones. Belongs to an event loop.

    Args:
        on_loss: called with the error of a role that is gone, frozen, or has failed.
        on_signal: called with the number of a signal that asked a role to stop.
    """

    def __init__(
        self,
        interval: HeartbeatInterval,
        on_loss: Callable[[LostRoleError], None],
        on_signal: Callable[[int], None],
    ) -> None:
        self._interval = interval
        self._on_loss = on_loss
        self._on_signal = on_signal
        self._silent_turns: dict[ConnectedRole, int] = {}
        self._gone: list[ConnectedRole] = []
        self._arriving: set[object] = set()
        self._departure_callbacks: list[Callable[[], None]] = []

    @contextmanager
    def arrival(self) -> Iterator[Callable[[], None]]:
        """Count an authenticated peer as present until it has registered, or its connection has ended.

        The block gets a function to call after the registration.
        """
        arrival = object()
        self._arriving.add(arrival)

        def end_arrival() -> None:
            self._arriving.discard(arrival)
            asyncio.get_running_loop().call_soon(self._report_departures)  # after monitor() has begun

        try:
            yield end_arrival
        finally:
            end_arrival()

    async def monitor(
        self,
        channel: MasterChannel,
        role: ConnectedRole,
        response: Sequence[bytes],
        failure: Callable[[], bytes],
    ) -> None:
        """Receive the heartbeats of a role until it leaves.

        Args:
            response: to its registration, which is its first heartbeat.
            failure: returns the reason if the run has failed, else nothing.
        """
        try:
            message = [_ALIVE]
            while message[0] in (_ALIVE, _SIGNALED):
                if message[0] == _SIGNALED:
                    self._on_signal(int(message[1]))
                self._silent_turns[role] = 0
                await channel.send(*response)
                message = await channel.receive()
                response = (failure(),)
            if message[0] == _MASTER_SILENT:
                cause = "the master was stopped" + ("" if role.is_local else ", or out of reach")
                unheard = f"has ended, since it had received nothing from it for {self._interval.timeout}"
                self._on_loss(LostHostError(f"{cause}: {role} {unheard}"))
            elif reason := message[1].decode():
                self._on_loss(EndedRoleError(f"{role} has ended: {reason}", ExitCode(int(message[2]))))
        except (OSError, EOFError):
            self._forget(role)
            self._on_loss(await self._gone_with_its_host(role))
        finally:
            self._forget(role)

    async def _gone_with_its_host(self, role: ConnectedRole) -> LostRoleError:
        """Return the error for a broken connection: it names the host if all its connections broke."""
        self._gone.append(role)
        if not role.is_local:
            await asyncio.sleep(_TOGETHER_SECONDS)
        together = [each for each in self._gone if each.machine == role.machine]
        is_host_there = any(each.machine == role.machine for each in self._silent_turns)
        if role.is_local or is_host_there or len(together) == 1:
            return LostRoleError(f"lost {role}")
        return LostHostError(f"lost {name_hosts(together)}")

    async def count_silence(self) -> None:
        """Count every role's silent turns; does not return."""
        while True:
            await asyncio.sleep(self._interval.turn_seconds)
            for role in self._silent_turns:
                self._silent_turns[role] += 1
            while late := [
                role for role, turns in self._silent_turns.items() if turns >= self._interval.turns
            ]:
                self._give_up(late[0])

    def _give_up(self, role: ConnectedRole) -> None:
        longest = self._interval.turns - _TURNS_APART
        alive = {each.machine for each, turns in self._silent_turns.items() if turns < longest}
        lost = [each for each in self._silent_turns if not each.is_local and each.machine not in alive]
        if role in lost:
            verb = "is" if len({each.machine for each in lost}) == 1 else "are"
            error: LostRoleError = LostHostError(self._interval.describe_unreachable(name_hosts(lost), verb))
        else:
            error, lost = LostRoleError(self._interval.describe_frozen(str(role))), [role]
        for each in lost:
            self._forget(each)
        self._on_loss(error)

    def call_after_departures(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once no role is left, except frozen ones."""
        self._departure_callbacks.append(callback)
        self._report_departures()

    def _forget(self, role: ConnectedRole) -> None:
        self._silent_turns.pop(role, None)
        self._report_departures()

    def _report_departures(self) -> None:
        while self._departure_callbacks and not self._silent_turns and not self._arriving:
            self._departure_callbacks.pop()()

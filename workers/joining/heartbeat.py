"""Signs of life between the master and every other role. Free of torch.

Each role has a thread that sends the master a sign of life over a connection of its own; the answer says
whether the run has failed. The first is its claim of its place in the cluster, so that every member is heard
from the beginning.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable

from hybrid.errors import ClusterError, first_line
from hybrid.topology import Role
from workers.joining.alarm import EndedRoleError, LostRoleError, StoppedError, last_words
from workers.joining.channel import Channel, MasterChannel
from workers.joining.rhythm import Rhythm

_FAREWELL_SECONDS = 1.0
_ALIVE, _FAREWELL = b"alive", b"farewell"

LIFE = b"life"  # what the connection is for
TAKEN: list[bytes] = []  # what one hears who claims a place that another has; an empty message


class Pulse:
    """A role's side: claims its place, and tells the master that it lives as long as a ``with`` block.

    Args:
        channel: a connection of its own, which is closed at the end.
        ring: called once if the master is gone or frozen, or the run has failed.

    Raises:
        ClusterError: the place is taken, or the master is gone or frozen.
    """

    def __init__(
        self, channel: Channel, role: Role, rhythm: Rhythm, ring: Callable[[ClusterError], None]
    ) -> None:
        self._channel = channel
        self._rhythm = rhythm
        self._ring = ring
        self._leaving = threading.Event()
        self._last_words = ""
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        try:
            self._claim(role)
        except BaseException:
            channel.close()
            raise

    def _claim(self, role: Role) -> None:
        about = str(role), socket.gethostname(), str(os.getpid())
        try:
            self._channel.send(LIFE, *(part.encode() for part in about))
            answer = self._channel.receive()
        except OSError as error:
            raise _went_away(error) from error
        if answer == TAKEN:
            raise ClusterError(f"{role} is already taken in this cluster: was it started twice?")

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, StoppedError):
            self._last_words = last_words(error)
        self._leaving.set()
        self._thread.join(_FAREWELL_SECONDS)

    def _run(self) -> None:
        try:
            if reason := self._beat():
                self._ring(StoppedError(f"stopped by the master: {reason}"))
                self._leaving.wait()
            self._channel.send(_FAREWELL, self._last_words.encode())
        except ClusterError as error:
            self._ring(error)
        except OSError as error:
            if not self._leaving.is_set():
                self._ring(_went_away(error))
        finally:
            self._channel.close()

    def _beat(self) -> str:
        """Send signs of life until this role leaves, or the run has failed; why it has."""
        reason = ""
        while not reason and not self._leaving.wait(self._rhythm.turn_seconds):
            self._channel.send(_ALIVE)
            # The turn before the question counts: the master has not been heard in it.
            reason = self._channel.receive(-self._rhythm.turn_seconds)[0].decode()
        return reason


def _went_away(error: OSError) -> StoppedError:
    return StoppedError(f"the master went away: {first_line(error)}")


class Watch:
    """The master's side: who is there, and who is not any more. Belongs to an event loop.

    Args:
        lost: called with the error of a role that is gone, frozen, or says that it has failed.
    """

    def __init__(self, rhythm: Rhythm, lost: Callable[[LostRoleError], None]) -> None:
        self._rhythm = rhythm
        self._lost = lost
        self._silent_turns: dict[str, int] = {}
        self._waiting: list[Callable[[], None]] = []

    async def attend(self, channel: MasterChannel, who: str, stop_reason: Callable[[], str]) -> None:
        """Listen to a role until it leaves.

        Args:
            who: the role, its host and pid.
            stop_reason: why the run has failed; empty where it has not.
        """
        try:
            message = [_ALIVE]
            while message[0] == _ALIVE:
                self._silent_turns[who] = 0
                await channel.send(stop_reason().encode())
                message = await channel.receive()
            if reason := message[1].decode():
                self._lost(EndedRoleError(f"{who} has ended: {reason}"))
        except (OSError, EOFError):
            self._lost(LostRoleError(f"lost {who}"))
        finally:
            self._forget(who)

    async def count(self) -> None:
        """Count everybody's silence; does not return."""
        while True:
            await asyncio.sleep(self._rhythm.turn_seconds)
            for who in list(self._silent_turns):
                self._silent_turns[who] += 1
                if self._silent_turns[who] >= self._rhythm.turns:
                    self._forget(who)
                    self._lost(LostRoleError(self._rhythm.frozen(who)))

    def when_all_left(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once nobody is there any more but those who are frozen."""
        self._waiting.append(call)
        self._tell()

    def _forget(self, who: str) -> None:
        self._silent_turns.pop(who, None)
        self._tell()

    def _tell(self) -> None:
        while self._waiting and not self._silent_turns:
            self._waiting.pop()()

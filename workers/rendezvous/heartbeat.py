"""Signs of life between the master and every other role. Free of torch.

Each role has a thread that sends the master a sign of life over a connection of its own; the answer says
whether the run has failed. The first is its claim of its place in the cluster (``admission``), so that every
member is heard from the beginning.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from hybrid.errors import ClusterError, HybridError, first_line
from workers.exit_codes import ExitCode, Word, exit_code
from workers.rendezvous.channel import Channel, MasterChannel
from workers.rendezvous.heartbeat_interval import Rhythm
from workers.rendezvous.interrupt import (
    EndedRoleError,
    LostHostError,
    LostRoleError,
    StoppedError,
    last_words,
)
from workers.rendezvous.membership import Presence, name_hosts
from workers.rendezvous.registration import LIFE, OVER, REFUSED, TAKEN, Claim, Welcome

_FAREWELL_SECONDS = 1.0
_ALIVE, _ASKED, _FAREWELL, _UNHEARD = b"alive", b"asked", b"farewell", b"unheard"
# Roles of a host that fall silent together: their last signs of life are so far apart at most.
_TURNS_APART = 2
# And whose connections end together, with their host.
_TOGETHER_SECONDS = 0.3


def claim_place(channel: Channel, claim: Claim) -> Welcome:
    """Claim a role's place, over the connection of its signs of life, which are due from then on.

    Raises:
        ClusterError: the place is taken, or the master is gone or frozen.
        HybridError: the cluster has no such place, or not for a role of these versions.
        StoppedError: there is nothing to do, and all is well.
    """
    try:
        channel.send(LIFE, claim.packed())
        answer, *more = channel.receive()
    except OSError as error:
        raise _went_away(error) from error
    if answer == TAKEN:
        raise ClusterError(f"{claim.role} is already taken in this cluster: was it started twice?")
    if answer == REFUSED:
        raise HybridError(more[0].decode())
    if answer == OVER:
        raise StoppedError(more[0].decode(), ExitCode.DONE)
    return Welcome.unpacked(more[0])


class Pulse:
    """A role's side: tells the master that it lives as long as a ``with`` block.

    Args:
        channel: a connection of its own, by which the role has claimed its place; it is closed at the end.
        ring: called once if the master is gone or frozen, or the run has failed.
    """

    def __init__(self, channel: Channel, ring: Callable[[ClusterError], None]) -> None:
        self._channel = channel
        self._turn_seconds = channel.rhythm.turn_seconds
        self._ring = ring
        self._leaving = threading.Event()
        self._asked_by = b""
        self._last_words = [b"", b""]
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, StoppedError):
            self._last_words = [last_words(error).encode(), b"%d" % exit_code(error)]
        self._leaving.set()
        self._thread.join(_FAREWELL_SECONDS)

    def pass_on(self, number: int) -> None:
        """Tell the master that this role was asked to stop by a signal; called in its handler."""
        self._asked_by = b"%d" % number

    def _run(self) -> None:
        try:
            if text := self._beat().decode():
                word = Word.parse(text)
                self._ring(StoppedError(f"stopped by the master: {word.reason}", word.code))
                self._leaving.wait()
            self._channel.send(_FAREWELL, *self._last_words)
        except ClusterError as error:
            self._ring(error)
            with suppress(OSError, ClusterError):  # a master that was stopped hears it when it goes on
                self._channel.send(_UNHEARD)
        except OSError as error:
            if not self._leaving.is_set():
                self._ring(_went_away(error))
        finally:
            self._channel.close()

    def _beat(self) -> bytes:
        """Send signs of life until this role leaves, or the run has failed; the master's word of that."""
        word = b""
        while not word and not self._leaving.wait(self._turn_seconds):
            asked_by, self._asked_by = self._asked_by, b""
            self._channel.send(*((_ASKED, asked_by) if asked_by else (_ALIVE,)))
            # The turn before the question counts: the master has not been heard in it.
            word = self._channel.receive(-self._turn_seconds)[0]
        return word


def _went_away(error: OSError) -> StoppedError:
    return StoppedError(f"the master went away: {first_line(error)}")


class Watch:
    """The master's side: who is there, and who is not any more. Belongs to an event loop.

    Args:
        lost: called with the error of a role that is gone, frozen, or says that it has failed.
        asked: called with the number of the signal by which a role was asked to stop.
    """

    def __init__(
        self, rhythm: Rhythm, lost: Callable[[LostRoleError], None], asked: Callable[[int], None]
    ) -> None:
        self._rhythm = rhythm
        self._lost = lost
        self._asked = asked
        self._silent_turns: dict[Presence, int] = {}
        self._gone: list[Presence] = []
        self._arriving: set[object] = set()
        self._waiting: list[Callable[[], None]] = []

    @contextmanager
    def arrival(self) -> Iterator[Callable[[], None]]:
        """Somebody has proved the secret: not all have left, until it has said who it is, or gone.

        What it yields is to be called once it has; a role is to be attended to at once.
        """
        visit = object()
        self._arriving.add(visit)

        def arrived() -> None:
            self._arriving.discard(visit)
            asyncio.get_running_loop().call_soon(self._tell)  # once a role is attended to

        try:
            yield arrived
        finally:
            arrived()

    async def attend(
        self, channel: MasterChannel, who: Presence, answer: Sequence[bytes], word: Callable[[], bytes]
    ) -> None:
        """Listen to a role until it leaves.

        Args:
            answer: to its claim, which is its first sign of life.
            word: what is to be told it, where the run has failed; else empty.
        """
        try:
            message = [_ALIVE]
            while message[0] in (_ALIVE, _ASKED):
                if message[0] == _ASKED:
                    self._asked(int(message[1]))
                self._silent_turns[who] = 0
                await channel.send(*answer)
                message = await channel.receive()
                answer = (word(),)
            if message[0] == _UNHEARD:
                self._lost(self._unheard(who))
            elif reason := message[1].decode():
                self._lost(EndedRoleError(f"{who} has ended: {reason}", ExitCode(int(message[2]))))
        except (OSError, EOFError):
            self._forget(who)
            self._lost(await self._gone_with_its_host(who))
        finally:
            self._forget(who)

    def _unheard(self, by: Presence) -> LostHostError:
        cause = "the master was stopped" if by.is_here else "the master was stopped, or out of reach"
        unheard = f"has ended, since it had heard nothing of it for {self._rhythm.timeout}"
        return LostHostError(f"{cause}: {by} {unheard}")

    async def _gone_with_its_host(self, who: Presence) -> LostRoleError:
        """What is said of a role whose connection has ended: its host is named where all of that have."""
        self._gone.append(who)
        if not who.is_here:
            await asyncio.sleep(_TOGETHER_SECONDS)
        together = [each for each in self._gone if each.machine == who.machine]
        is_host_there = any(each.machine == who.machine for each in self._silent_turns)
        if who.is_here or is_host_there or len(together) == 1:
            return LostRoleError(f"lost {who}")
        return LostHostError(f"lost {name_hosts(together)}")

    async def count(self) -> None:
        """Count everybody's silence; does not return."""
        while True:
            await asyncio.sleep(self._rhythm.turn_seconds)
            for who in self._silent_turns:
                self._silent_turns[who] += 1
            while late := [who for who, turns in self._silent_turns.items() if turns >= self._rhythm.turns]:
                self._give_up(late[0])

    def _give_up(self, who: Presence) -> None:
        unreachable = self._on_silent_hosts()
        if who in unreachable:
            verb = "is" if len({each.machine for each in unreachable}) == 1 else "are"
            error: LostRoleError = LostHostError(self._rhythm.unreachable(name_hosts(unreachable), verb))
        else:
            error, unreachable = LostRoleError(self._rhythm.frozen(str(who))), [who]
        for each in unreachable:
            self._forget(each)
        self._lost(error)

    def _on_silent_hosts(self) -> list[Presence]:
        """Who is on other hosts of which nobody is heard."""
        longest = self._rhythm.turns - _TURNS_APART
        heard = {who.machine for who, turns in self._silent_turns.items() if turns < longest}
        return [who for who in self._silent_turns if not who.is_here and who.machine not in heard]

    def when_all_left(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once nobody is there any more but those who are frozen."""
        self._waiting.append(call)
        self._tell()

    def _forget(self, who: Presence) -> None:
        self._silent_turns.pop(who, None)
        self._tell()

    def _tell(self) -> None:
        while self._waiting and not self._silent_turns and not self._arriving:
            self._waiting.pop()()

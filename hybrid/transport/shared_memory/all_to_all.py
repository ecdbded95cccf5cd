"""What the trainers of one host hand to each other in memory that they share: any of them to any.

A slot holds packets::

    where that for each place begins    8 bytes a place, 0 where there is none
    packet: length of its head          8 bytes
            head                        a pickle of numbers, text, and lists of such: nothing that has a name
            tensors                     the bytes of each
"""

import io
import pickle
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from hybrid.security.rejected_messages import PlainUnpickler
from hybrid.transport.shared_memory.shared_block import SharedMemory
from hybrid.transport.shared_memory.tensor_layout import aligned, described, num_bytes, tensors_in, write

_NUMBER = struct.Struct("<Q")


class Packet(NamedTuple):
    """What one hands to another.

    Attributes:
        values: numbers, text, and tuples and lists of such.
    """

    values: list[Any]
    tensors: list[Tensor]


def all_to_all(memory: SharedMemory, outgoing: Mapping[int, Packet]) -> dict[int, Packet]:
    """What others have for this one, for what this one has for others, by place; all call this at once.

    Tensors lie in the memory of who has handed them over, and are good until the next turn of ``memory``.

    Raises:
        ClusterError: another trainer is gone, or did not come in time.
    """
    packed = {place: _Packed(each) for place, each in outgoing.items() if place != memory.place}
    starts = [0] * len(memory.members)
    end = table = _NUMBER.size * len(starts)
    for place, each in packed.items():
        starts[place] = aligned(end)
        end = starts[place] + len(each)
    slot = memory.slot(end)
    slot[:table] = struct.pack(f"<{len(starts)}Q", *starts)
    for place, each in packed.items():
        each.write(slot[starts[place] :])
    incoming = {}
    for place, slot in enumerate(memory.publish()):
        is_own = place == memory.place
        if (packet := outgoing.get(place) if is_own else _packet_in(slot, memory.place)) is not None:
            incoming[place] = packet
    return incoming


class _Packed:
    """A packet as bytes."""

    def __init__(self, packet: Packet) -> None:
        self._tensors = packet.tensors
        self._shapes = described(packet.tensors)
        self._head = pickle.dumps((packet.values, self._shapes), pickle.HIGHEST_PROTOCOL)

    def __len__(self) -> int:
        return self._start + num_bytes(self._shapes)

    @property
    def _start(self) -> int:
        """Of the tensors."""
        return aligned(_NUMBER.size + len(self._head))

    def write(self, room: memoryview) -> None:
        _NUMBER.pack_into(room, 0, len(self._head))
        room[_NUMBER.size : _NUMBER.size + len(self._head)] = self._head
        write(self._tensors, room, self._start)


def _packet_in(slot: memoryview, place: int) -> Packet | None:
    """The packet in a slot for this place, if there is one."""
    (start,) = _NUMBER.unpack_from(slot, _NUMBER.size * place)
    if not start:
        return None
    (head,) = _NUMBER.unpack_from(slot, start)
    end = start + _NUMBER.size + head
    values, shapes = PlainUnpickler(io.BytesIO(slot[start + _NUMBER.size : end])).load()
    return Packet(values, tensors_in(slot, aligned(end), shapes))

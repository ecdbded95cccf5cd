"""What each of some threads hands to each, in memory that they share."""

import pytest
import torch
from support.shared_memory import at_once, joined
from torch import Tensor

from hybrid.security.rejected_messages import RejectedMessage
from hybrid.transport.shared_memory.all_to_all import Packet, all_to_all
from hybrid.transport.shared_memory.shared_block import SharedMemory
from hybrid.transport.shared_memory.tensor_layout import DTYPES


def tensors(*pair: int) -> list[Tensor]:
    """Of every type, of shapes that depend on who has them for whom; some are empty."""
    first, second = pair
    generator = torch.Generator().manual_seed(10 * first + second)
    shapes = [(first, second), (3, 1, 2 + second), (), (7 * first,)] * 2
    return [
        (100 * torch.rand(shape, generator=generator)).to(dtype)
        for shape, dtype in zip(shapes, DTYPES, strict=True)
    ]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_has_what_the_others_had_for_it(size: int) -> None:
    def exchange(memory: SharedMemory) -> None:
        place = memory.place
        outgoing = {to: Packet([place, to, ("for", to)], tensors(place, to)) for to in range(size)}
        for _ in range(3):
            incoming = all_to_all(memory, outgoing)
            assert list(incoming) == list(range(size))
            for other, (values, received) in incoming.items():
                assert values == [other, place, ("for", place)]
                for expected, tensor in zip(tensors(other, place), received, strict=True):
                    assert tensor.dtype == expected.dtype
                    assert torch.equal(tensor, expected)

    at_once(exchange, joined(size))


def test_who_has_nothing_for_another_is_not_heard_of() -> None:
    def exchange(memory: SharedMemory) -> dict[int, list[int]]:
        place = memory.place
        for_next = {place + 1: Packet([place], [])} if place < 2 else {}
        return {other: packet.values for other, packet in all_to_all(memory, for_next).items()}

    assert at_once(exchange, joined(3)) == [{}, {0: [0]}, {1: [1]}]


def test_packets_may_grow_and_shrink_and_be_empty() -> None:
    def exchange(memory: SharedMemory) -> None:
        other = 1 - memory.place
        for turn in range(60):
            count = (turn * 7919 % 11) ** 6 if turn % 3 else 0
            packet = Packet([turn], [torch.full((count,), float(10 * memory.place + turn))])
            (values, (received,)) = all_to_all(memory, {0: packet, 1: packet})[other]
            assert values == [turn]
            assert torch.equal(received, torch.full((count,), float(10 * other + turn)))

    at_once(exchange, joined(2))


def test_what_is_not_in_one_piece_arrives_so() -> None:
    columns = torch.arange(12.0).view(3, 4)[:, 1:3]
    packet = Packet([], [columns])

    def exchange(memory: SharedMemory) -> Tensor:
        (_, (received,)) = all_to_all(memory, dict.fromkeys((0, 1), packet))[1 - memory.place]
        return received.clone()

    for received in at_once(exchange, joined(2)):
        assert torch.equal(received, columns)


def test_a_value_that_has_a_name_is_refused() -> None:
    def exchange(memory: SharedMemory) -> None:
        with pytest.raises(RejectedMessage):
            all_to_all(memory, {1 - memory.place: Packet([print], [])})

    at_once(exchange, joined(2))

"""Messages on a connection: what comes is what was sent, in whatever pieces it comes."""

import os
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support.socket_ends import frames
from torch import Tensor

from hybrid.security import message_signature
from hybrid.security.rejected_messages import RejectedMessage
from hybrid.transport.socket.frames import FrameKind, Frames, Message

WHOLE = 1 << 20


class Pieces:
    """A connection on which what was given comes, so many bytes at a time."""

    def __init__(self, data: bytes, piece: int) -> None:
        self._data = memoryview(data)
        self._piece = piece

    def recv_into(self, room: memoryview) -> int:
        if not self._data:
            raise BlockingIOError
        count = min(self._piece, len(room), len(self._data))
        room[:count] = self._data[:count]
        self._data = self._data[count:]
        return count


def received(receiver: Frames, data: bytes, piece: int = WHOLE) -> Iterator[Message]:
    pieces: Any = Pieces(data, piece)
    while receiver.receive(pieces):
        while (message := receiver.next()) is not None:
            yield message


def answer(number: int, *tensors: Tensor) -> Message:
    return Message(FrameKind.RESPONSE, number, None, tensors)


def call(value: Any, *tensors: Tensor) -> Message:
    return Message(FrameKind.CALL, 1, value, tensors)


def travelled(*tensors: Tensor) -> Sequence[Tensor]:
    trainer, worker = frames()
    (came,) = received(trainer, bytes(worker.seal(answer(3, *tensors))))
    assert came[:3] == (FrameKind.RESPONSE, 3, None)
    return came.tensors


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.rand(5, 3).mul(100).to(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)),
        *(torch.arange(7, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.uint8)),
        torch.tensor([True, False]),
        torch.tensor(1.5),
        torch.empty(0, 4),
        torch.tensor([float("nan"), -0.0, float("inf")]),
        torch.rand(6, 6)[:, 2],
        torch.rand(4, 3).t(),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_a_received_tensor_has_the_same_bits(tensor: Tensor) -> None:
    there = travelled(tensor)[0]
    assert (there.dtype, there.shape) == (tensor.dtype, tensor.shape)
    assert b"".join(message_signature.memory_of(there)) == b"".join(
        message_signature.memory_of(tensor.contiguous())
    )
    there.fill_(1)  # it is the receiver's to write


def test_a_received_call_equals_the_sent_one() -> None:
    value = ("a function", (7, (0, 1.5, True, None), [("text", -1)], {"key": 2}))
    trainer, worker = frames()
    (came,) = received(worker, bytes(trainer.seal(call(value, torch.ones(2), torch.zeros(3)))))
    assert came[:3] == (FrameKind.CALL, 1, value)
    assert [each.tolist() for each in came.tensors] == [[1, 1], [0, 0, 0]]


@pytest.mark.parametrize("piece", [1, 7, 1000, WHOLE])
def test_messages_are_read_from_chunks_of_any_size(piece: int) -> None:
    trainer, worker = frames()
    sizes = [0, 1, 3000, 2, 20_000, 10]  # larger than the buffers begin, and smaller
    data = b"".join(bytes(worker.seal(answer(i, torch.full((size,), i)))) for i, size in enumerate(sizes))
    came = list(received(trainer, data, piece))
    assert [each.number for each in came] == list(range(len(sizes)))
    assert [each.tensors[0].tolist() for each in came] == [[i] * size for i, size in enumerate(sizes)]


def test_huge_tensors_are_sent_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_signature, "LARGEST_SEGMENT", 1000)
    tensor = torch.rand(1234)
    assert torch.equal(travelled(tensor, torch.ones(2))[0], tensor)


def test_a_frame_is_encrypted() -> None:
    trainer, _ = frames()
    ids = torch.full((100,), 0x4142434445464748)
    frame = bytes(trainer.seal(call(("hybrid.transport.rpc.endpoints:lookup", "a word"), ids)))
    assert b"HGFEDCBA" not in frame
    assert b"lookup" not in frame
    assert b"a word" not in frame


def test_every_altered_byte_is_rejected() -> None:
    sealed = bytes(frames()[0].seal(call("f", torch.ones(3))))
    for at in range(len(sealed)):
        altered = bytearray(sealed)
        altered[at] ^= 1
        _, worker = frames()
        try:
            came = list(received(worker, bytes(altered)))
        except RejectedMessage:
            continue
        assert came == [], f"byte {at} was altered, and nobody noticed"
        assert at < 12, "a wrong length may have the receiver wait for more"


@pytest.mark.parametrize("order", [(0, 0), (1,)], ids=["repeated", "left out"])
def test_a_frame_out_of_order_is_rejected(order: tuple[int, ...]) -> None:
    trainer, worker = frames()
    sealed = [bytes(trainer.seal(call(name))) for name in "fg"]
    with pytest.raises(RejectedMessage, match="altered, repeated or left out"):
        list(received(worker, b"".join(sealed[each] for each in order)))


def test_a_claimed_length_allocates_no_memory() -> None:
    _, worker = frames()
    claimed = b"\xff" * 4 + (1 << 60).to_bytes(8, "little")
    assert list(received(worker, claimed + os.urandom(200_000))) == []
    assert len(worker._received) < 1 << 20


def test_a_message_of_the_wrong_kind_is_rejected() -> None:
    trainer, worker = frames()
    with pytest.raises(RejectedMessage, match="unexpected"):
        list(received(worker, bytes(trainer.seal(Message(FrameKind.FAILURE, 1, "no")))))
    trainer, worker = frames()
    with pytest.raises(RejectedMessage, match="unexpected"):
        list(received(trainer, bytes(worker.seal(call("f")))))


def test_extra_bytes_after_a_message_are_rejected() -> None:
    trainer, worker = frames()
    sealed = bytes(worker.seal(answer(1, torch.ones(3))))
    longer = sealed[:4] + (len(sealed) - 12 + 5).to_bytes(8, "little") + sealed[12:] + b"extra"
    with pytest.raises(RejectedMessage, match="unexpected"):
        list(received(trainer, longer))


@pytest.mark.parametrize("head", [b"", b"\x80", pickle.dumps(7), pickle.dumps((0, 1, None, [(99, (1,))]))])
def test_a_sealed_head_without_a_message_is_rejected(head: bytes) -> None:
    trainer, worker = frames()
    sealed = trainer._sending.seal(head)
    lengths = len(sealed).to_bytes(4, "little") + len(sealed).to_bytes(8, "little")
    with pytest.raises(RejectedMessage, match="it holds no message"):
        list(received(worker, lengths + sealed))


def test_a_tensor_larger_than_its_message_is_rejected() -> None:
    trainer, worker = frames()
    sealed = bytes(worker.seal(answer(1, torch.ones(3))))
    head = int.from_bytes(sealed[:4], "little")
    cut = sealed[:4] + head.to_bytes(8, "little") + sealed[12 : 12 + head]
    with pytest.raises(RejectedMessage, match="larger than the message"):
        list(received(trainer, cut))

"""Messages on a connection, and tensors in memory that both ends have."""

import gc
import os
import socket
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from support.socket_ends import frames, shared
from torch import Tensor

from hybrid.errors import ClusterError
from hybrid.security import message_signature
from hybrid.security.rejections import RejectionError
from hybrid.shared_memory.tensor_blocks import (
    MIN_BLOCK_BYTES,
    BlockReader,
    BlockWriter,
    MemoryPair,
    create_memory,
    layout_of,
)
from hybrid.transport.socket.frames import FrameKind, Frames, Message

LARGE = 1 << 20


class Chunks:
    """A connection from which data is received in chunks of some bytes."""

    def __init__(self, data: bytes, size: int) -> None:
        self._data = memoryview(data)
        self._size = size

    def recv_into(self, buffer: memoryview) -> int:
        if not self._data:
            raise BlockingIOError
        count = min(self._size, len(buffer), len(self._data))
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count


def received(receiver: Frames, data: bytes, size: int = LARGE) -> Iterator[Message]:
    connection: Any = Chunks(data, size)
    while receiver.receive(connection):
        while (message := receiver.next()) is not None:
            yield message


def response(number: int, *tensors: Tensor) -> Message:
    return Message(FrameKind.RESPONSE, number, None, tensors)


def call(value: Any, *tensors: Tensor) -> Message:
    return Message(FrameKind.CALL, 1, value, tensors)


def sent_and_received(*tensors: Tensor) -> Sequence[Tensor]:
    trainer, worker = frames()
    (message,) = received(trainer, bytes(worker.seal(response(3, *tensors))))
    assert message[:3] == (FrameKind.RESPONSE, 3, None)
    return message.tensors


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
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_a_received_tensor_has_the_same_bits(tensor: Tensor) -> None:
    copy = sent_and_received(tensor)[0]
    assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
    bits, expected = (b"".join(message_signature.memory_of(t)) for t in (copy, tensor.contiguous()))
    assert bits == expected
    copy.fill_(1)  # the receiver may write it


def test_a_received_call_equals_the_sent_one() -> None:
    value = ("a function", (7, (0, 1.5, True, None), [("text", -1)], {"key": 2}))
    trainer, worker = frames()
    (message,) = received(worker, bytes(trainer.seal(call(value, torch.ones(2), torch.zeros(3)))))
    assert message[:3] == (FrameKind.CALL, 1, value)
    assert [each.tolist() for each in message.tensors] == [[1, 1], [0, 0, 0]]


@pytest.mark.parametrize("size", [1, 7, 1000, LARGE])
def test_messages_are_read_from_chunks_of_any_size(size: int) -> None:
    trainer, worker = frames()
    lengths = [0, 1, 3000, 2, 20_000, 10]  # larger than the first buffers, and smaller
    data = b"".join(bytes(worker.seal(response(i, torch.full((n,), i)))) for i, n in enumerate(lengths))
    messages = list(received(trainer, data, size))
    assert [each.number for each in messages] == list(range(len(lengths)))
    assert [each.tensors[0].tolist() for each in messages] == [[i] * n for i, n in enumerate(lengths)]


def test_huge_tensors_are_sent_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_signature, "LARGEST_SEGMENT", 1000)
    tensor = torch.rand(1234)
    assert torch.equal(sent_and_received(tensor, torch.ones(2))[0], tensor)


def test_a_frame_is_encrypted() -> None:
    trainer, _ = frames()
    ids = torch.full((100,), 0x4142434445464748)
    frame = bytes(trainer.seal(call(("hybrid.transport.endpoints:lookup", "a word"), ids)))
    assert not any(text in frame for text in (b"HGFEDCBA", b"lookup", b"a word"))


def test_every_altered_byte_is_rejected() -> None:
    sealed = bytes(frames()[0].seal(call("f", torch.ones(3))))
    for i in range(len(sealed)):
        altered = bytearray(sealed)
        altered[i] ^= 1
        _, worker = frames()
        try:
            assert list(received(worker, bytes(altered))) == [], f"altered byte {i} is accepted"
        except RejectionError:
            continue
        assert i < 12, "a wrong length may make the receiver wait for more"


@pytest.mark.parametrize("order", [(0, 0), (1,)], ids=["repeated", "left out"])
def test_a_frame_out_of_order_is_rejected(order: tuple[int, ...]) -> None:
    trainer, worker = frames()
    sealed = [bytes(trainer.seal(call(name))) for name in "fg"]
    with pytest.raises(RejectionError):
        list(received(worker, b"".join(sealed[each] for each in order)))


def test_a_claimed_length_allocates_no_memory() -> None:
    _, worker = frames()
    claimed = b"\xff" * 4 + (1 << 60).to_bytes(8, "little")
    tracemalloc.start()
    assert list(received(worker, claimed + os.urandom(200_000))) == []
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()


def truncated(sealed: bytes) -> bytes:
    head = int.from_bytes(sealed[:4], "little")
    return sealed[:4] + head.to_bytes(8, "little") + sealed[12 : 12 + head]


def extended(sealed: bytes) -> bytes:
    return sealed[:4] + (len(sealed) - 12 + 5).to_bytes(8, "little") + sealed[12:] + b"extra"


@pytest.mark.parametrize("change", [truncated, extended])
def test_a_message_of_the_wrong_length_is_rejected(change: Callable[[bytes], bytes]) -> None:
    trainer, worker = frames()
    with pytest.raises(RejectionError):
        list(received(trainer, change(bytes(worker.seal(response(1, torch.ones(3)))))))


def test_a_message_of_the_wrong_kind_is_rejected() -> None:
    for sender, receiver, message in zip(
        frames(), reversed(frames()), (Message(FrameKind.FAILURE, 1, "no"), call("f")), strict=True
    ):
        with pytest.raises(RejectionError):
            list(received(receiver, bytes(sender.seal(message))))


def write_block(writer: BlockWriter, *tensors: Tensor) -> int:
    block = writer.write(tensors)
    assert block is not None
    return block


def test_tensors_of_a_block_have_the_same_bits() -> None:
    ours, theirs = shared()
    sent = [
        torch.rand(MIN_BLOCK_BYTES),
        torch.rand(7, 5).t(),
        torch.arange(9, dtype=torch.int32)[::2],
        torch.empty(0, 4),
        torch.tensor(float("nan")),
        torch.tensor([True, False]),
        torch.rand(33, requires_grad=True),
    ]
    read = theirs.reader.read(write_block(ours.writer, *sent), layout_of(sent))
    for expected, tensor in zip(sent, read, strict=True):
        assert (tensor.dtype, tensor.shape, tensor.requires_grad) == (expected.dtype, expected.shape, False)
        assert torch.equal(tensor.nan_to_num(9), expected.nan_to_num(9))
        assert tensor.is_contiguous()


def test_a_block_in_use_is_not_reused() -> None:
    ours, theirs = shared()
    writer, reader = ours.writer, theirs.reader
    sent = [torch.zeros(MIN_BLOCK_BYTES), torch.zeros(3)]
    blocks = [write_block(writer, *sent) for _ in range(3)]
    read = [reader.read(block, layout_of(sent)) for block in blocks]
    assert blocks == sorted(set(blocks))
    assert reader.take_released() == []
    kept = read[1][1][1:].numpy()  # a slice of a tensor keeps its block
    read.clear()
    gc.collect()
    assert sorted(reader.take_released()) == [blocks[0], blocks[2]]
    assert reader.take_released() == [], "each once"
    writer.free([blocks[0], blocks[2]])
    assert write_block(writer, torch.ones(MIN_BLOCK_BYTES)) == blocks[0]
    assert write_block(writer, torch.ones(MIN_BLOCK_BYTES)) > blocks[1]
    assert kept.tolist() == [0, 0]


def test_tensors_that_do_not_fit_are_not_written() -> None:
    writer = shared(16 * MIN_BLOCK_BYTES)[0].writer
    first = write_block(writer, torch.zeros(MIN_BLOCK_BYTES))
    large = torch.zeros(MIN_BLOCK_BYTES + 64)
    assert writer.write([large]) is None
    writer.free([first])
    assert write_block(writer, large) == 0


def test_a_block_beyond_the_memory_is_rejected() -> None:
    reader: BlockReader = shared()[1].reader
    for start in (-64, MemoryPair.NUM_BYTES // 2 - MIN_BLOCK_BYTES):
        with pytest.raises(ValueError, match="buffer length"):
            reader.read(start, layout_of([torch.zeros(MIN_BLOCK_BYTES)]))


def test_memory_without_seals_is_rejected() -> None:
    """A role that reads memory which its owner truncates ends by SIGBUS."""
    descriptor = os.memfd_create("hybrid")
    os.ftruncate(descriptor, MemoryPair.NUM_BYTES)
    with pytest.raises(ValueError, match="not sealed"):
        MemoryPair.map(descriptor, writes_first_half=False)
    os.close(descriptor)
    descriptor = create_memory(MIN_BLOCK_BYTES)
    for size in (0, 2 * MIN_BLOCK_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)


def passed(sender: Frames, receiver: Frames, message: Message) -> Message:
    """Send a message through a pair of sockets."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        ours.sendall(sender.seal(message))
        assert receiver.receive(theirs)
        result = receiver.next()
    assert result is not None
    return result


def test_frames_return_blocks_for_reuse() -> None:
    trainer, worker = frames(is_one_host=True)
    addresses = set()
    for number in range(20):
        with pytest.raises(ClusterError, match=r"^tensors of torch\.complex64 on cpu cannot be sent"):
            trainer.seal(call("f", torch.zeros(MIN_BLOCK_BYTES, dtype=torch.complex64)))
        sent = Message(FrameKind.CALL, number, "f", [torch.full((MIN_BLOCK_BYTES,), number)])
        request = passed(trainer, worker, sent)
        reply = passed(worker, trainer, response(number, request.tensors[0] + 1))
        assert reply.tensors[0].eq(number + 1).all()
        addresses |= {request.tensors[0].data_ptr(), reply.tensors[0].data_ptr()}
        del request, reply
    assert len(addresses) <= 4


def test_a_block_without_memory_is_rejected() -> None:
    (with_memory, _), (_, worker) = frames(is_one_host=True), frames()
    with pytest.raises(RejectionError):
        passed(with_memory, worker, call("f", torch.zeros(MIN_BLOCK_BYTES)))

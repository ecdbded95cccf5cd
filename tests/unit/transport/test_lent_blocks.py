"""Memory that one end lends and the other borrows: what comes, and which bytes are taken again."""

import gc
import os
import socket

import pytest
import torch
from support.socket_ends import frames, shared
from torch import Tensor

from hybrid.security.rejected_messages import RejectedMessage
from hybrid.transport.shared_memory import lent_blocks
from hybrid.transport.shared_memory.lent_blocks import (
    Block,
    BorrowedMemory,
    LentMemory,
    layout_of,
)
from hybrid.transport.socket.frames import FrameKind, Frames, Message

MANY = lent_blocks.LEAST_BYTES


@pytest.fixture
def ends() -> tuple[LentMemory, BorrowedMemory]:
    """Of one direction."""
    ours, theirs = shared()
    return ours.lent, theirs.borrowed


def lent(lender: LentMemory, *tensors: Tensor) -> Block:
    block = lender.lend(tensors, layout_of(tensors))
    assert block is not None
    return block


def test_borrowed_tensors_have_the_same_bits(ends: tuple[LentMemory, BorrowedMemory]) -> None:
    lender, borrower = ends
    sent = [
        torch.rand(MANY),
        torch.rand(7, 5).t(),
        torch.arange(9, dtype=torch.int32)[::2],
        torch.empty(0, 4),
        torch.tensor(float("nan")),
        torch.tensor([True, False]),
        torch.rand(33, requires_grad=True),
    ]
    block = lent(lender, *sent)
    came = borrower.tensors(block, layout_of(sent))
    for expected, tensor in zip(sent, came, strict=True):
        assert (tensor.dtype, tensor.shape, tensor.requires_grad) == (expected.dtype, expected.shape, False)
        assert torch.equal(tensor.nan_to_num(9), expected.nan_to_num(9))
        assert tensor.is_contiguous()


def test_a_block_in_use_is_not_reused(
    ends: tuple[LentMemory, BorrowedMemory],
) -> None:
    lender, borrower = ends
    sent = [torch.zeros(MANY), torch.zeros(3)]
    blocks = [lent(lender, *sent) for _ in range(3)]
    came = [borrower.tensors(block, layout_of(sent)) for block in blocks]
    starts = [block.start for block in blocks]
    assert starts == sorted(set(starts))
    assert borrower.returned() == []
    kept = came[1][1][1:].numpy()  # a part of a tensor is enough
    came.clear()
    gc.collect()
    assert sorted(borrower.returned()) == [blocks[0].number, blocks[2].number]
    assert borrower.returned() == [], "each once"
    lender.free([blocks[0].number, blocks[2].number])
    assert lent(lender, torch.ones(MANY)).start == starts[0]
    assert lent(lender, torch.ones(MANY)).start > starts[1]
    assert kept.tolist() == [0, 0]


def test_the_first_large_enough_gap_is_reused(ends: tuple[LentMemory, BorrowedMemory]) -> None:
    lender, _ = ends
    blocks = [lent(lender, torch.zeros(size)) for size in (MANY, MANY, 5 * MANY, MANY)]
    lender.free([blocks[0].number, blocks[2].number])
    assert lent(lender, torch.zeros(3 * MANY)).start == blocks[2].start
    assert lent(lender, torch.zeros(MANY)).start == 0
    assert lent(lender, torch.zeros(MANY)).start == blocks[2].start + 12 * MANY


def test_tensors_that_do_not_fit_are_not_lent(
    ends: tuple[LentMemory, BorrowedMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    lender, _ = ends
    monkeypatch.setattr(lent_blocks, "NUM_BYTES", 8 * MANY)
    first = lent(lender, torch.zeros(MANY))
    large = torch.zeros(MANY + 64)
    assert lender.lend([large], layout_of([large])) is None
    lender.free([first.number])
    assert lent(lender, large).start == 0


def test_a_block_beyond_the_memory_is_rejected(ends: tuple[LentMemory, BorrowedMemory]) -> None:
    shapes = layout_of([torch.zeros(MANY)])
    for start in (-64, lent_blocks.NUM_BYTES - MANY):
        with pytest.raises(ValueError, match="buffer length"):
            ends[1].tensors(Block(1, start), shapes)


def test_unsealed_memory_is_rejected() -> None:
    """A role that reads such memory would end by SIGBUS."""
    descriptor = os.memfd_create("hybrid")
    os.ftruncate(descriptor, lent_blocks.NUM_BYTES)
    with pytest.raises(ValueError, match="not sealed"):
        BorrowedMemory(descriptor)
    os.close(descriptor)
    lender = LentMemory()
    for size in (0, 2 * lent_blocks.NUM_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(lender.descriptor, size)
    lender.close()


def passed(sender: Frames, receiver: Frames, message: Message) -> Message:
    """A message as it comes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        frame = sender.seal(message)
        ours.sendall(frame)
        while receiver.receive(theirs):
            if (came := receiver.next()) is not None:
                return came
    raise AssertionError("it has not come")


def test_frames_return_blocks_for_reuse() -> None:
    """However many large messages go back and forth, they lie in the same few places."""
    trainer, worker = frames(is_one_host=True)
    places = set()
    for number in range(20):
        call = passed(trainer, worker, Message(FrameKind.CALL, number, "f", [torch.full((MANY,), number)]))
        answer = passed(worker, trainer, Message(FrameKind.RESPONSE, number, None, [call.tensors[0] + 1]))
        assert answer.tensors[0].eq(number + 1).all()
        places |= {call.tensors[0].data_ptr(), answer.tensors[0].data_ptr()}
        del call, answer
    assert len(places) <= 4


def test_a_block_without_memory_is_rejected() -> None:
    (with_memory, _), (_, worker) = frames(is_one_host=True), frames()
    with pytest.raises(RejectedMessage, match="memory that does not exist"):
        passed(with_memory, worker, Message(FrameKind.CALL, 1, "f", [torch.zeros(MANY)]))

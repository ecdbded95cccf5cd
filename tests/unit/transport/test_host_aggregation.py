"""Trainers that ask workers together: threads with memory in common, workers that write down what comes."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeAlias

import pytest
import torch
from support.shared_memory import at_once, joined
from torch import Tensor
from torch.futures import Future

from hybrid.embedding.bags import Bags, Item
from hybrid.errors import ClusterError
from hybrid.primitives.deferred_response import ObservableResult
from hybrid.protocol.ticket import Purpose, Ticket
from hybrid.security.rejected_messages import describe_exception
from hybrid.topology import Role, RoleKind
from hybrid.transport import RemoteTables
from hybrid.transport.rpc.endpoints import PlainSegment
from hybrid.transport.shared_memory.host_aggregation import (
    HostAggregation,
    Packet,
    all_to_all,
)
from hybrid.transport.shared_memory.shared_slots import SharedSlots
from hybrid.transport.shared_memory.tensor_blocks import DTYPES

TRAINERS, WORKERS = 3, 4


class Worker(RemoteTables):
    """Answers each lookup with its ids, plus a hundred times the worker's number; tells what has come."""

    def __init__(self, index: int, failure: str | None = None) -> None:
        super().__init__(Role(RoleKind.WORKER, index), 5)
        self.came: list[tuple[list[PlainSegment], list[Tensor]]] = []
        self._failure = failure

    def send_segments(
        self, segments: Sequence[PlainSegment], tensors: Sequence[Tensor]
    ) -> ObservableResult[Any]:
        self.came.append((list(segments), [each.clone() for each in tensors]))
        answer: Future[list[Tensor]] = Future()
        if self._failure is not None:
            answer.set_exception(RuntimeError(self._failure))  # type: ignore[arg-type]
            return answer
        rest, found = iter(tensors), []
        for _, num_grads, _, items in segments:
            list(islice(rest, num_grads))
            found += [next(rest) + 100.0 * self.role.index for _ in items]
        answer.set_result(found)
        return answer


class Trainer:
    """One of those that ask together, with stubs of its own of the workers."""

    def __init__(self, memory: SharedSlots, failure: str | None = None) -> None:
        self.index = memory.rank
        self.workers = [Worker(index, failure) for index in range(WORKERS)]
        self.sources = HostAggregation(memory, self.workers).sources()

    def ticket(self, step: int) -> Ticket:
        return Ticket(self.index, step, step, purpose=Purpose.PREFETCH)

    def look_up(self, step: int) -> list[ObservableResult[list[Tensor]]]:
        """A lookup of each worker: its own items, as many as its number."""
        return [s.lookup(self.ticket(step), self.items(step, w)) for w, s in self.sources.items()]

    def items(self, step: int, worker: int) -> list[Item]:
        return [(group, Bags(self.ids(step, worker, group))) for group in range(worker)]

    def ids(self, step: int, worker: int, group: int) -> Tensor:
        return torch.tensor([self.index, step, worker, group] * (1 + group), dtype=torch.int32)

    def check(self, step: int, answers: list[ObservableResult[list[Tensor]]]) -> None:
        for worker, answer in enumerate(answers):
            found = answer.wait()
            assert len(found) == worker
            for group, tensor in enumerate(found):
                assert torch.equal(tensor, self.ids(step, worker, group) + 100.0 * worker)


def trainers(failure: str | None = None) -> list[Trainer]:
    return [Trainer(memory, failure) for memory in joined(TRAINERS)]


Message: TypeAlias = tuple[list[PlainSegment], list[Tensor]]


def messages(members: list[Trainer], worker: int) -> list[Message]:
    """What they have sent to a worker."""
    return [message for each in members for message in each.workers[worker].came]


def test_a_worker_gets_one_message_with_all_segments_in_order() -> None:
    members = trainers()
    at_once(lambda each: each.check(0, each.look_up(0)), members)
    for worker in range(WORKERS):
        (parts, tensors), *more = messages(members, worker)
        assert more == []
        assert [next_ticket[0] for _, _, next_ticket, _ in parts if next_ticket] == [0, 1, 2]
        assert len(tensors) == TRAINERS * worker
    assert not any(worker.came for other in members[1:] for worker in other.workers)


def test_gradients_and_the_next_lookup_are_one_segment() -> None:
    def train(each: Trainer) -> None:
        answers = {step: each.look_up(step) for step in (0, 1)}
        for step in range(6):
            each.check(step, answers.pop(step))
            grads = [torch.full((2, 3), float(10 * each.index + step))]
            if step < 4:
                answers[step + 2] = [
                    source.send_gradients(
                        each.ticket(step), grads, each.ticket(step + 2), each.items(step + 2, w)
                    )
                    for w, source in each.sources.items()
                ]
            else:
                answers[step + 2] = [
                    source.send_gradients(each.ticket(step), grads) for source in each.sources.values()
                ]
        for step in (6, 7):
            assert [answer.wait() for answer in answers[step]] == [[]] * WORKERS

    members = trainers()
    at_once(train, members)
    came = messages(members, 3)
    assert len(came) == 2 + 6
    parts, tensors = came[2]
    assert [(ticket[:2], count, ahead[:2]) for ticket, count, ahead, _ in parts if ticket and ahead] == [
        ((trainer, 0), 1, (trainer, 2)) for trainer in range(TRAINERS)
    ]
    assert [tensor[0, 0].item() for tensor in tensors[:: 1 + 3]] == [0.0, 10.0, 20.0]


def test_a_trainer_without_segments_takes_part_in_a_round() -> None:
    def take_part(each: Trainer) -> None:
        for step in (0, 1):
            if each.index == 1 and step == 0:
                each.check(0, each.look_up(0))
            else:
                skipped = [source.skip() for source in each.sources.values()]
                assert [answer.wait() for answer in skipped] == [[]] * WORKERS

    members = trainers()
    at_once(take_part, members)
    came = messages(members, 2)
    assert [[ticket[0] for _, _, ticket, _ in parts if ticket] for parts, _ in came] == [[1]]


def test_a_failed_request_fails_for_every_trainer() -> None:
    members = trainers(describe_exception(ClusterError("trainer 1 sent gradients of step 0 twice")))

    def fail(each: Trainer) -> None:
        for answer in each.look_up(0):
            with pytest.raises(RuntimeError, match="trainer 1 sent gradients of step 0 twice"):
                answer.wait()

    at_once(fail, members)


def test_responses_are_copied_from_reused_memory() -> None:
    def keep(each: Trainer) -> None:
        kept = [answer.wait() for answer in each.look_up(0)]
        for step in range(1, 5):
            each.check(step, each.look_up(step))
        for worker, found in enumerate(kept):
            for group, tensor in enumerate(found):
                assert torch.equal(tensor, each.ids(0, worker, group) + 100.0 * worker)

    at_once(keep, trainers())


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
def test_all_to_all_exchanges_packets(size: int) -> None:
    def exchange(memory: SharedSlots) -> None:
        rank = memory.rank
        outgoing = {to: Packet([rank, to, ("for", to)], tensors(rank, to)) for to in range(size)}
        for _ in range(3):
            incoming = all_to_all(memory, outgoing)
            assert list(incoming) == list(range(size))
            for other, (values, received) in incoming.items():
                assert values == [other, rank, ("for", rank)]
                for expected, tensor in zip(tensors(other, rank), received, strict=True):
                    assert tensor.dtype == expected.dtype
                    assert torch.equal(tensor, expected)

    at_once(exchange, joined(size))

"""The update barrier: what an update waits for, and what a lookup sees. No test sleeps; events meet."""

from __future__ import annotations

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from support.barriers import (
    NORM,
    PATIENCE_SECONDS,
    Applied,
    Gate,
    ahead,
    answer,
    barrier,
    give,
    ignore,
    is_done,
    nothing,
    when,
)

from hybrid.errors import ClusterError
from hybrid.steps.rules import Staleness, UpdateMode
from hybrid.steps.ticket import Purpose, Ticket


class TestSync:
    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    def test_contributions_meet_in_trainer_order(self, order: tuple[int, ...]) -> None:
        applied: Applied = []
        with barrier(3, applied.append) as each:
            for step in range(2):
                for trainer in order:
                    give(each, trainer, step)
                answer(when(each, step + 1, nothing))
            assert each.version == 2
        assert applied == [[f"t{t}s{step}" for t in range(3)] for step in range(2)]

    @pytest.mark.parametrize("order", list(itertools.permutations([(0, 0), (0, 1), (1, 0), (1, 1)])))
    def test_the_parts_of_a_trainer_are_one_share_in_their_order(
        self, order: tuple[tuple[int, int], ...]
    ) -> None:
        applied: Applied = []
        with barrier(2, applied.append, parts=2) as each:
            for number, (trainer, part) in enumerate(order):
                assert (each.version, len(each._ledger._entries)) == (0, len({t for t, _ in order[:number]}))
                give(each, trainer, 0, f"t{trainer}p{part}", part=part)
            answer(when(each, 1, nothing))
        assert applied == [["t0p0", "t0p1", "t1p0", "t1p1"]]

    def test_trainers_in_threads_train_in_step_and_in_order(self) -> None:
        num_trainers, num_steps = 6, 50
        applied: Applied = []
        with barrier(num_trainers, applied.append) as each, ThreadPoolExecutor(num_trainers) as pool:

            def train(trainer: int) -> list[int]:
                seen = []
                for step in range(num_steps):
                    seen.append(answer(when(each, step, lambda: len(applied))))
                    give(each, trainer, step)
                return seen

            for seen in pool.map(train, range(num_trainers)):
                assert seen == list(range(num_steps))
            each.drain()
        assert applied == [[f"t{t}s{step}" for t in range(num_trainers)] for step in range(num_steps)]

    def test_a_lookup_waits_for_the_version_that_it_asked_for(self) -> None:
        gate = Gate()
        with barrier(1, gate) as each:
            assert when(each, 0, lambda: "at once").done()
            first, second = when(each, 1, lambda: len(gate.applied)), when(each, 2, lambda: len(gate.applied))
            give(each, 0, 0)
            gate.await_entry()
            assert not first.done()  # the update is under way
            gate.let_through()
            assert answer(first) == 1
            assert not second.done()
            give(each, 0, 1)
            gate.let_through()
            assert answer(second) == 2

    def test_waiting_lookups_hold_no_thread(self) -> None:
        with barrier(1, ignore) as each:
            before = threading.active_count()
            futures = [when(each, 1, lambda i=i: i) for i in range(500)]  # type: ignore[misc]
            assert threading.active_count() == before
            assert not any(future.done() for future in futures)
            give(each, 0, 0)
            assert [answer(future) for future in futures] == list(range(500))

    def test_a_failing_lookup_fails_alone(self) -> None:
        with barrier(1, ignore) as each:
            at_once, later, fine = when(each, 0, fail), when(each, 1, fail), when(each, 1, lambda: "fine")
            give(each, 0, 0)
            assert answer(fine) == "fine"
            for future in (at_once, later):
                with pytest.raises(ZeroDivisionError):
                    answer(future)


def fail() -> float:
    return 1 / 0


class TestPipelined:
    EVENTS = tuple(itertools.product(("lookup", "gradients"), range(2)))

    @pytest.mark.parametrize("order", list(itertools.permutations(EVENTS)))
    def test_an_update_waits_for_the_lookups_that_must_not_see_it(
        self, order: tuple[tuple[str, int], ...]
    ) -> None:
        """Whatever arrives first: the lookups of step 1 see no update, and the one of step 0 follows them."""
        applied: Applied = []
        with barrier(2, applied.append, UpdateMode.PIPELINED) as each:
            updated = each.when(Ticket(0, 1, 1, purpose=Purpose.PREDICT), nothing)
            for kind, trainer in order:
                assert not is_done(updated, 0.005)
                if kind == "lookup":
                    assert answer(ahead(each, trainer, 1, lambda: len(applied))) == 0
                else:
                    give(each, trainer, 0, followed=True)
            answer(updated)
        assert applied == [["t0s0", "t1s0"]]

    def test_a_lookup_ahead_waits_for_the_update_before_the_last(self) -> None:
        gate = Gate()
        with barrier(1, gate, UpdateMode.PIPELINED) as each:
            answer(ahead(each, 0, 1, nothing))
            second = ahead(each, 0, 2, lambda: len(gate.applied))
            give(each, 0, 0, followed=True)
            give(each, 0, 1, followed=True)
            gate.await_entry()
            assert not second.done()
            gate.let_through()
            assert answer(second) == 1  # though the gradients of step 1 were in
            gate.let_through()
            each.drain()
            assert each.version == 2

    def test_an_update_waits_until_a_lookup_has_read_its_rows(self) -> None:
        """Not only until it arrived: rows must not change under its hands."""
        gate, reading, may_end = Gate(), threading.Event(), threading.Event()

        def read() -> int:
            reading.set()
            assert may_end.wait(PATIENCE_SECONDS)
            return len(gate.applied)

        with barrier(1, gate, UpdateMode.PIPELINED) as each, ThreadPoolExecutor(1) as pool:
            looking_up = pool.submit(ahead, each, 0, 1, read)
            assert reading.wait(PATIENCE_SECONDS)
            give(each, 0, 0, followed=True)
            assert not gate.entered.acquire(timeout=0.02)
            may_end.set()
            gate.await_entry()
            assert answer(looking_up.result()) == 0
            gate.let_through()

    def test_all_parts_of_a_step_are_looked_up_before_the_update(self) -> None:
        applied: Applied = []
        with barrier(1, applied.append, UpdateMode.PIPELINED, parts=2) as each:
            updated = each.when(Ticket(0, 1, 1, purpose=Purpose.PREDICT), nothing)
            for part in range(2):
                give(each, 0, 0, f"p{part}", part=part, followed=True)
            for part in range(2):
                assert not is_done(updated)
                assert answer(ahead(each, 0, 1, lambda: len(applied), part)) == 0
            answer(updated)
        assert applied == [["p0", "p1"]]

    def test_a_lookup_of_another_purpose_does_not_count(self) -> None:
        with barrier(1, ignore, UpdateMode.PIPELINED) as each:
            answer(each.when(Ticket(0, 1, 0, purpose=Purpose.PREDICT), nothing))
            give(each, 0, 0, followed=True)
            updated = when(each, 1, nothing)
            assert not is_done(updated)
            answer(ahead(each, 0, 1, nothing))
            answer(updated)

    def test_the_last_step_waits_for_no_lookup(self) -> None:
        with barrier(1, ignore, UpdateMode.PIPELINED) as each:
            give(each, 0, 0, followed=False)
            answer(when(each, 1, nothing))

    @pytest.mark.parametrize("seed", range(3))
    def test_every_lookup_of_trainers_in_threads_sees_the_updates_it_asked_for(self, seed: int) -> None:
        num_trainers, num_steps, parts = 4, 30, 2
        applied: Applied = []
        with (
            barrier(num_trainers, applied.append, UpdateMode.PIPELINED, parts=parts) as each,
            ThreadPoolExecutor(num_trainers) as pool,
        ):

            def train(trainer: int) -> list[int]:
                """Each step's gradients and the lookups of the next arrive in any order."""
                chance = random.Random(100 * seed + trainer)
                first = [ahead(each, trainer, 0, lambda: len(applied), part) for part in range(parts)]
                seen = [answer(lookup) for lookup in first]
                for step in range(num_steps):
                    followed = step + 1 < num_steps
                    kinds = ("gradients", "lookup") if followed else ("gradients",)
                    arrivals = list(itertools.product(kinds, range(parts)))
                    chance.shuffle(arrivals)
                    lookups = []
                    for kind, part in arrivals:
                        if kind == "lookup":
                            lookups.append(ahead(each, trainer, step + 1, lambda: len(applied), part))
                        else:
                            give(each, trainer, step, f"t{trainer}p{part}", part=part, followed=followed)
                    seen += [answer(lookup) for lookup in lookups]
                return seen

            expected = [max(0, step - 1) for step in range(num_steps) for _ in range(parts)]
            for seen in pool.map(train, range(num_trainers)):
                assert seen == expected
            each.drain()
            assert not each._ledger._served
        assert applied == [[f"t{t}p{p}" for t in range(num_trainers) for p in range(parts)]] * num_steps


class TestAsync:
    def test_lookups_wait_for_their_own_trainers_updates_only(self) -> None:
        gate = Gate()
        with barrier(3, gate, UpdateMode.ASYNC) as each:
            each.restart(7)
            give(each, 1, 7)
            gate.await_entry()
            give(each, 1, 8)  # while the update is under way
            give(each, 0, 7)
            assert answer(when(each, 7, lambda: len(gate.applied), trainer=2)) == 0
            own = [when(each, 8 + t, lambda: len(gate.applied), trainer=t) for t in (0, 1)]
            assert not any(future.done() for future in own)
            gate.let_through()
            gate.await_entry()
            assert not any(future.done() for future in own)
            gate.let_through()
            assert [answer(future) for future in own] == [2, 2]
            each.drain()
            assert each.version == 9
        assert gate.applied == [["t1s7"], ["t0s7", "t1s8"]]  # what has come meanwhile is one update

    def test_the_parts_of_a_share_are_applied_together(self) -> None:
        applied: Applied = []
        with barrier(2, applied.append, UpdateMode.ASYNC, parts=2) as each:
            give(each, 0, 0, "p1", part=1)
            assert answer(each.when(Ticket(0, 0, 0, 1), lambda: "of the same step")) == "of the same step"
            later = when(each, 1, nothing)
            assert not is_done(later)
            give(each, 0, 0, "p0", part=0)
            answer(later)
        assert applied == [["p0", "p1"]]

    def test_a_trainers_steps_are_applied_in_their_order(self) -> None:
        """The gradients of its last step may overtake those before, which wait for the last lookup ahead."""
        applied: Applied = []
        with barrier(2, applied.append, UpdateMode.ASYNC) as each:
            for step in (0, 1):
                answer(ahead(each, 0, step, nothing))
            give(each, 0, 1, updates_here=True)
            seen = when(each, 2, lambda: list(applied))
            assert not is_done(seen)
            give(each, 1, 0, updates_here=True)
            give(each, 0, 0, followed=True, updates_here=True)
            assert answer(seen) == [["t1s0"], ["t0s0", "t0s1"]]
            each.drain()
            assert not each._ledger._served

    def test_a_trainer_goes_on_after_steps_without_it(self) -> None:
        applied: Applied = []
        with barrier(2, applied.append, UpdateMode.ASYNC) as each:
            give(each, 0, 0, updates_here=True)
            for first, again in ((1, 3), (4, 6)):
                each.finish(0, first)
                answer(when(each, again, nothing))  # of its own, nothing is missing
                each.rejoin(0, again)
                later = when(each, again + 1, nothing)
                assert not is_done(later)
                give(each, 0, again, updates_here=True)
                answer(later)
        assert applied == [["t0s0"], ["t0s3"], ["t0s6"]]

    def test_a_lookup_ahead_waits_for_no_gradients_that_wait_for_it(self) -> None:
        """Those of the step before it may have come already; they are applied once it is answered."""
        gate = Gate()
        with barrier(1, gate, UpdateMode.ASYNC) as each:
            for step in (0, 1):
                answer(ahead(each, 0, step, nothing))
            give(each, 0, 0, followed=True)
            gate.await_entry()
            lookup = ahead(each, 0, 2, lambda: len(gate.applied))
            give(each, 0, 1, followed=True)
            assert not is_done(lookup)  # it must see the update of step 0, which is under way
            gate.let_through()
            assert answer(lookup) == 1
            gate.await_entry()
            gate.let_through()
            each.drain()
        assert gate.applied == [["t0s0"], ["t0s1"]]

    @pytest.mark.parametrize("seed", range(2))
    def test_trainers_in_threads_see_their_own_updates_but_the_last(self, seed: int) -> None:
        """Each part's gradients come with its lookup of two steps on, the parts in any order."""
        num_trainers, num_steps, parts = 3, 30, 2
        applied: Applied = []
        with (
            barrier(num_trainers, applied.append, UpdateMode.ASYNC, parts=parts) as each,
            ThreadPoolExecutor(num_trainers) as pool,
        ):

            def own_updates(trainer: int) -> int:
                return sum(c == f"t{trainer}p0" for contributions in list(applied) for c in contributions)

            def train(trainer: int) -> list[int]:
                chance = random.Random(100 * seed + trainer)
                under_way = {
                    step: [
                        ahead(each, trainer, step, lambda: own_updates(trainer), part)
                        for part in range(parts)
                    ]
                    for step in (0, 1)
                }
                fewest = []
                for step in range(num_steps):
                    fewest.append(min(answer(lookup) for lookup in under_way.pop(step)))
                    under_way[step + 2] = []
                    for part in chance.sample(range(parts), parts):
                        give(each, trainer, step, f"t{trainer}p{part}", part=part, followed=True)
                        lookup = ahead(each, trainer, step + 2, lambda: own_updates(trainer), part)
                        under_way[step + 2].append(lookup)
                for lookups in under_way.values():
                    for lookup in lookups:
                        answer(lookup)
                return fewest

            for seen in pool.map(train, range(num_trainers)):
                assert all(count >= max(0, step - 1) for step, count in enumerate(seen))
            each.drain()
        assert sum(map(len, applied)) == num_trainers * num_steps * parts


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_drain_returns_after_the_update_under_way(mode: UpdateMode) -> None:
    gate = Gate()
    with barrier(1, gate, mode) as each, ThreadPoolExecutor(1) as pool:
        each.drain()  # nothing is under way
        give(each, 0, 0)
        gate.await_entry()
        drained = pool.submit(each.drain)
        assert not wait([drained], timeout=0.02).done
        gate.let_through()
        drained.result(PATIENCE_SECONDS)
        assert gate.applied == [["t0s0"]]


class TestRefusals:
    @pytest.mark.parametrize("mode", list(UpdateMode))
    def test_a_second_contribution_to_a_step_that_waits_is_refused(self, mode: UpdateMode) -> None:
        with barrier(2, ignore, mode) as each:
            give(each, 0, 1)
            with pytest.raises(ClusterError, match=r"^trainer 0 sent gradients of step 1 twice$"):
                give(each, 0, 1)

    @pytest.mark.parametrize("mode", list(UpdateMode))
    def test_a_second_contribution_to_an_update_under_way_is_refused(self, mode: UpdateMode) -> None:
        gate = Gate()
        with barrier(1, gate, mode) as each:
            give(each, 0, 0)
            gate.await_entry()
            with pytest.raises(ClusterError, match=r"^trainer 0 sent gradients of step 0 twice$"):
                give(each, 0, 0)
            gate.let_through()
            each.drain()
        assert gate.applied == [["t0s0"]]

    def test_a_second_contribution_of_a_part_is_refused(self) -> None:
        with barrier(1, ignore, parts=2) as each:
            give(each, 0, 0, part=1)
            with pytest.raises(ClusterError, match=r"^trainer 0 sent gradients of step 0 twice$"):
                give(each, 0, 0, part=1)

    @pytest.mark.parametrize("mode", list(UpdateMode))
    def test_a_contribution_to_a_step_that_is_done_is_refused(self, mode: UpdateMode) -> None:
        applied: Applied = []
        with barrier(1, applied.append, mode) as each:
            give(each, 0, 0)
            each.drain()
            with pytest.raises(ClusterError, match=r"^trainer 0 sent gradients of step 0 twice$"):
                give(each, 0, 0)
            each.drain()  # what was refused has left nothing
        assert applied == [["t0s0"]]


class TestRestart:
    def test_it_counts_on_from_a_checkpoint(self) -> None:
        applied: Applied = []
        with barrier(1, applied.append) as each:
            each.restart(293)
            assert each.version == 293
            assert when(each, 293, lambda: "at once").done()
            later = when(each, 294, lambda: len(applied))
            give(each, 0, 293)
            assert answer(later) == 1

    def test_it_is_refused_while_something_is_under_way(self) -> None:
        gate = Gate()
        with barrier(1, gate) as each:
            give(each, 0, 0)
            gate.await_entry()
            with pytest.raises(AssertionError):
                each.restart(5)
            gate.let_through()
            each.drain()
            each.restart(5)
            assert each.version == 5

    def test_it_forgets_ends_and_what_was_looked_up_ahead(self) -> None:
        with barrier(2, ignore, UpdateMode.PIPELINED) as each:
            for trainer in range(2):
                answer(ahead(each, trainer, 1, nothing))
                give(each, trainer, 0, followed=True)
            each.finish(1, 1)
            each.drain()
            each.restart(0)
            for trainer in range(2):
                give(each, trainer, 0, followed=True)
            updated = when(each, 1, nothing)
            for trainer in range(2):
                assert not is_done(updated)
                answer(ahead(each, trainer, 1, nothing))
            answer(updated)
            give(each, 1, 1)

    def test_it_may_go_back_to_steps_that_were_decided(self) -> None:
        with barrier(1, ignore, decided=True) as each:
            for start in (7, 5):
                each.restart(start)
                norm = each.norm(start)
                assert not norm.done()
                give(each, 0, start)
                assert answer(norm) == NORM
                each.decide(start, 1.0)
                each.drain()


class TestStaleness:
    """How many updates lie between reading rows and updating them."""

    @pytest.mark.parametrize(
        ("mode", "expected"),
        [(UpdateMode.SYNC, Staleness(6, 0, 0)), (UpdateMode.PIPELINED, Staleness(6, 4, 1))],
    )
    def test_in_step_it_is_given_by_the_mode(self, mode: UpdateMode, expected: Staleness) -> None:
        with barrier(2, ignore, mode) as each:
            for step in range(3):
                read_at = step if mode is UpdateMode.SYNC else max(0, step - 1)
                for trainer in range(2):
                    each.contribute(Ticket(trainer, step, step), "", read_at)
            each.drain()
            assert each.take_staleness() == expected
            assert each.take_staleness() == Staleness()

    @pytest.mark.parametrize("parts_read_at", [(4, 2), (2, 4)])
    def test_the_oldest_part_counts(self, parts_read_at: tuple[int, int]) -> None:
        with barrier(1, ignore, parts=2) as each:
            each.restart(5)
            for part, read_at in enumerate(parts_read_at):
                each.contribute(Ticket(0, 5, 5, part), "", read_at)
            each.drain()
            assert each.take_staleness() == Staleness(1, 3, 3)

    def test_out_of_step_it_is_counted(self) -> None:
        gate = Gate()
        with barrier(3, gate, UpdateMode.ASYNC) as each:
            each.contribute(Ticket(0, 0, 0), "", 0)
            gate.await_entry()
            for trainer in (1, 2):
                each.contribute(Ticket(trainer, 0, 0), "", 0)
            gate.let_through()
            gate.let_through()
            each.drain()
            each.contribute(Ticket(0, 1, 1), "", 2)
            gate.let_through()
            each.drain()
            assert each.take_staleness() == Staleness(4, 0 + 1 + 1 + 0, 1)

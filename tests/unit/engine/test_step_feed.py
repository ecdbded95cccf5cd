"""The updates that the lookups of a trainer must see."""

from types import SimpleNamespace
from typing import Any

import pytest

from hybrid.engine.step_feed import Feed
from hybrid.primitives.step_timings import StepClock
from hybrid.updates.ticket import Ticket
from hybrid.updates.update_rules import UpdateMode, UpdateRules


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_a_pass_begins_after_all_updates_of_earlier_steps(mode: UpdateMode) -> None:
    versions = [5, 5, 6, 7] if mode is UpdateMode.ASYNC else [5, 6, 7, 8]
    tickets: list[Ticket] = []

    def lookup(ids: object, ticket: Ticket, after: object) -> object:
        tickets.append(ticket)
        return object()

    tables: Any = SimpleNamespace(lookup=lookup)
    batch: Any = SimpleNamespace(checksum=0, sparse_features=None, split=lambda count: [batch] * count)
    feed = Feed[Any](tables, 0, UpdateRules(1, mode), StepClock())
    feed.begin(iter([batch] * 4), 5)
    for step in feed:
        for micro in step.micro_batches:
            feed.start(micro)
        feed.end_step()
    assert [ticket[:3] for ticket in tickets] == [(0, 5 + n, version) for n, version in enumerate(versions)]

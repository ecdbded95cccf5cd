"""A ticket as plain values."""

import pytest

from hybrid.protocol.ticket import Purpose, Ticket


@pytest.mark.parametrize(("followed", "closing"), [(True, False), (False, True)])
@pytest.mark.parametrize("purpose", Purpose)
def test_ticket_round_trip(purpose: Purpose, followed: bool, closing: bool) -> None:
    ticket = Ticket(3, 5, 4, 1, purpose, followed, closing)
    assert {type(value) for value in ticket.plain} == {int, str, bool}
    assert Ticket.of(ticket.plain) == ticket
    assert Ticket.of(ticket.plain).purpose is purpose

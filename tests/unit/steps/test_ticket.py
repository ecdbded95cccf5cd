"""A ticket as plain values."""

import pytest

from hybrid.steps.ticket import Purpose, Ticket


@pytest.mark.parametrize("purpose", Purpose)
def test_a_ticket_is_the_same_again(purpose: Purpose) -> None:
    ticket = Ticket(3, 5, 4, 1, purpose, True)
    assert {type(value) for value in ticket.plain} == {int, str, bool}
    assert Ticket.of(ticket.plain) == ticket
    assert Ticket.of(ticket.plain).purpose is purpose

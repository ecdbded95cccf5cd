"""Numbers that have come already are not admitted again."""

import random

import pytest

from hybrid.security.message_signature import ReplayWindow

NUM_BYTES = 16
SIZE = 8 * NUM_BYTES


@pytest.mark.parametrize("jump", [1, 7, 8, SIZE - 8, SIZE, SIZE + 1, 5 * SIZE + 3, 1 << 63])
def test_old_numbers_stay_rejected_after_a_jump(jump: int) -> None:
    window = ReplayWindow(NUM_BYTES)
    old = range(20)
    assert all(window.accept(number) for number in old)
    assert window.accept(19 + jump)
    assert not any(window.accept(number) for number in [*old, 19 + jump])
    between = range(max(20, 19 + jump - SIZE + 8), 19 + jump)
    assert all(window.accept(number) for number in between)


def test_numbers_far_behind_are_rejected() -> None:
    """It cannot be told from what has come."""
    window = ReplayWindow(NUM_BYTES)
    assert window.accept(10 * SIZE)
    assert not window.accept(9 * SIZE - 8)


@pytest.mark.parametrize("seed", range(5))
def test_the_window_equals_a_set_of_numbers(seed: int) -> None:
    generator, window, seen, highest = random.Random(seed), ReplayWindow(NUM_BYTES), set[int](), 0
    for _ in range(3000):
        number = max(0, highest + generator.randint(-SIZE + 8, 30))
        assert window.accept(number) == (number not in seen)
        seen.add(number)
        highest = max(highest, number)

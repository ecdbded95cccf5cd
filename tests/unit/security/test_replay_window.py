"""A number is accepted once."""

import random

import pytest

from hybrid.security.message_signature import ReplayWindow

SIZE = 128


@pytest.mark.parametrize("jump", [1, SIZE - 1, SIZE, 5 * SIZE, 1 << 90])
def test_old_numbers_stay_rejected_after_a_jump(jump: int) -> None:
    window = ReplayWindow(SIZE)
    old = range(20)
    assert all(window.accept(number) for number in old)
    assert window.accept(19 + jump)
    assert not any(window.accept(number) for number in [*old, 19 + jump])
    between = range(20, 19 + min(jump, SIZE))
    assert all(window.accept(number) for number in reversed(between))
    assert not any(window.accept(number) for number in [*old, *between, 19 + jump])


def test_a_number_that_too_many_overtake_is_rejected() -> None:
    window = ReplayWindow(SIZE)
    assert all(window.accept(number) for number in range(1, SIZE + 2))
    assert not any(window.accept(number) for number in range(SIZE + 2))
    assert window.accept(SIZE + 2)


@pytest.mark.parametrize("seed", range(5))
def test_the_window_equals_a_set_of_numbers(seed: int) -> None:
    generator, window, seen = random.Random(seed), ReplayWindow(SIZE), set[int]()
    for start in range(0, 20 * SIZE, SIZE):
        for number in generator.sample(range(start, start + SIZE), SIZE):
            assert window.accept(number)
            seen.add(number)
            assert not any(map(window.accept, generator.choices(sorted(seen), k=3)))

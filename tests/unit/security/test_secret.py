"""The cluster's secret: its sources, the mode of its file, and its keys; a number is accepted once."""

import base64
import pickle
import random
import string
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from hybrid.errors import ConfigError
from hybrid.security.message_signature import ReplayWindow
from hybrid.security.secret import VARIABLE, Secret

LONG, OTHER = "4f1c2a99e07bd6385ce1f04bb7a86d23", "c0ffee5e72b1a94d8836df507b2e6a11"


@pytest.fixture(autouse=True)
def no_secret_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def found_key(file: str | Path) -> bytes:
    found = Secret.find(str(file))
    assert found is not None
    return found.key("calls")


def test_a_written_file_gives_the_same_keys(tmp_path: Path) -> None:
    secret, file = Secret.fresh(), tmp_path / "secret"
    secret.write(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert found_key(file) == secret.key("calls")


def test_the_environment_gives_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Secret.find("") is None
    monkeypatch.setenv(VARIABLE, f" {LONG}\n")
    assert found_key("") == Secret(LONG).key("calls")
    Secret(OTHER).write(tmp_path / "secret")
    assert found_key(tmp_path / "secret") == Secret(OTHER).key("calls")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_may_access_is_rejected(mode: int, tmp_path: Path) -> None:
    Secret.fresh().write(tmp_path / "secret")
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(ConfigError, match=r"cluster\.secret_file .*owner"):
        Secret.find(str(tmp_path / "secret"))


@pytest.mark.parametrize(
    "value",
    [LONG[:31], "password" * 4, "abcdefghijklmnopqrstuvwxyz012345", "11111111-1111-1111-1111-111111111111"],
)
def test_a_short_or_guessable_secret_is_rejected(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match=f"^{VARIABLE}: ") as raised:
        Secret.find("")
    assert value not in str(raised.value)


def test_random_secrets_are_accepted() -> None:
    """32 random hexadecimal digits, characters of base64, or decimal digits are enough."""
    draw = random.Random(1)
    for _ in range(500):
        Secret.fresh()
        Secret(draw.randbytes(16).hex())
        Secret(base64.b64encode(draw.randbytes(24)).decode())
        Secret("".join(draw.choices(string.digits, k=32)))


def test_a_missing_file_is_not_read_and_an_existing_one_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Secret.find(str(tmp_path / "secret"))
    (tmp_path / "secret").write_text("mine")
    with pytest.raises(ConfigError):
        Secret.fresh().write(tmp_path / "secret")
    assert (tmp_path / "secret").read_text() == "mine"


def test_keys_differ_by_secret_purpose_and_context() -> None:
    one, other = Secret(LONG), Secret(OTHER)
    keys = [
        one.key("calls"),
        other.key("calls"),
        one.key("store"),
        one.key("calls", b"1"),
        one.key("call", b"s"),
        one.key("calls", b"", b"agreed"),
        one.key("calls", b"", b"other"),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 32 for key in keys)
    assert one.key("calls", b"1") == Secret(LONG).key("calls", b"1")


def test_a_secret_is_hidden_in_text_and_can_be_pickled() -> None:
    secret = Secret(LONG)
    assert LONG not in f"{secret} {secret!r}"
    assert pickle.loads(pickle.dumps(secret)).key("calls") == secret.key("calls")


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


def test_threads_accept_a_number_once() -> None:
    meeting = threading.Barrier(2)

    class Number(int):
        def __hash__(self) -> int:
            with suppress(threading.BrokenBarrierError):
                meeting.wait(0.2)  # until both threads search for the number
            return super().__hash__()

    with ThreadPoolExecutor(2) as threads:
        accepted = threads.map(ReplayWindow(SIZE).accept, [Number(3)] * 2)
    assert sorted(accepted) == [False, True]


@pytest.mark.parametrize("seed", range(5))
def test_the_window_equals_a_set_of_numbers(seed: int) -> None:
    generator, window, seen = random.Random(seed), ReplayWindow(SIZE), set[int]()
    for start in range(0, 20 * SIZE, SIZE):
        for number in generator.sample(range(start, start + SIZE), SIZE):
            assert window.accept(number)
            seen.add(number)
            assert not any(map(window.accept, generator.choices(sorted(seen), k=3)))

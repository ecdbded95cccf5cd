"""The store of a cluster equals a store of torch, and a wait for a key can be interrupted."""

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist
from unit.rendezvous.running import SECONDS, OpenRendezvous, open_rendezvous

from hybrid.errors import ClusterError
from workers.rendezvous import bootstrap
from workers.rendezvous.bootstrap import RendezvousStore

MOMENT = timedelta(milliseconds=20)
FROZEN_SECONDS = 0.3


@pytest.fixture(scope="module")
def rendezvous() -> Iterator[OpenRendezvous]:
    with open_rendezvous() as opened:
        yield opened


@pytest.fixture
def store(rendezvous: OpenRendezvous) -> Iterator[RendezvousStore]:
    with rendezvous.store() as opened:
        yield opened


def history(store: dist.Store) -> list[object]:
    """Return the responses of a store to all operations of torch."""
    store.set("text", "a")
    store.set("bytes", b"\0\xff".decode("latin-1"))
    return [
        store.get("text"),
        store.get("bytes"),
        store.add("n", 3),
        store.add("n", -5),
        store.get("n"),
        store.check([]),
        store.check(["text", "n"]),
        store.check(["text", "none"]),
        store.compare_set("none", "", "first"),
        store.compare_set("none", "other", "second"),
        store.compare_set("none", "first", "third"),
        store.compare_set("never", "expected", "set"),
        store.check(["never"]),
        store.wait(["none"]),
        store.wait(["none", "text"], MOMENT),
        store.delete_key("none"),
        store.delete_key("none"),
        store.check(["none"]),
    ]


def test_the_store_equals_a_store_of_torch(store: RendezvousStore) -> None:
    assert history(store) == history(dist.HashStore())
    assert history(dist.PrefixStore("within", store)) == history(dist.HashStore())
    assert store.clone().get("text") == b"a"


def test_threads_share_a_store(store: RendezvousStore) -> None:
    """Torch's numbers of barriers are renumbered, and stay different."""

    def switch_threads(frame: FrameType, *_: object) -> Any:
        if frame.f_code.co_filename != bootstrap.__file__:
            return None
        frame.f_trace_opcodes = True
        time.sleep(0)
        return switch_threads

    threading.settrace(switch_threads)
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda number: store.add(f"_ID_{number}", 1), range(50)))
        threading.settrace(None)
    assert sums == [1] * 50


@pytest.mark.parametrize("operation", ["get", "wait"])
def test_waits_end_with_the_key(operation: str, store: RendezvousStore, rendezvous: OpenRendezvous) -> None:
    first, last = f"{operation} first", f"{operation} last"
    with ThreadPoolExecutor(1) as pool, rendezvous.store() as other:
        waiting = (
            pool.submit(store.get, last) if operation == "get" else pool.submit(store.wait, [last, first])
        )
        other.set(first, "")
        with pytest.raises(TimeoutError):
            waiting.result(MOMENT.total_seconds())
        store.set(last, "word")  # the same store serves other requests meanwhile
        assert waiting.result(SECONDS) == (b"word" if operation == "get" else None)


def test_a_wait_ends_at_the_timeout(store: RendezvousStore, rendezvous: OpenRendezvous) -> None:
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"'wait' of \('no', 'such'\)"):
        store.wait(["no", "such"], MOMENT)
    with rendezvous.store(MOMENT.total_seconds()) as impatient:
        with pytest.raises(dist.DistStoreError, match="'get'"):
            impatient.get("no")
        with pytest.raises(dist.DistStoreError, match="'wait'"):
            impatient.wait(["no"])
    assert time.monotonic() - began < SECONDS
    assert store.add("usable", 1) == 1


class Interrupted(Exception):
    """Raised by the handler of a signal."""


def test_an_interrupted_wait_leaves_the_store_usable(store: RendezvousStore) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(Interrupted):
            dist.PrefixStore("through C++", store).wait(["never"], timedelta(seconds=SECONDS))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    store.set("after", "a value")
    assert store.get("after") == b"a value"


@pytest.mark.parametrize("through", ["Python", "C++"])
def test_a_frozen_master_is_named(through: str) -> None:
    with open_rendezvous(FROZEN_SECONDS) as opened, opened.store() as store:
        client = store if through == "Python" else dist.PrefixStore("within", store)
        assert client.add("number", 1) == 1
        with opened.frozen():
            with pytest.raises(ClusterError, match="frozen"):
                client.add("number", 1)
            with pytest.raises(ClusterError, match="frozen"):  # a new connection
                client.check(["number"])
        assert client.check(["number"])


def test_without_the_master_there_is_an_error_at_once() -> None:
    with open_rendezvous() as opened, opened.store() as store, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, ["never"])
        assert store.add("the other waits", 1) == 1
        opened.rendezvous.__exit__(None, None, None)
        with pytest.raises(dist.DistNetworkError):
            waiting.result(SECONDS)
        with pytest.raises(dist.DistNetworkError, match=r"closed|refused|reset"):
            store.get("key")

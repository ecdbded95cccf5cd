"""An answer knows whom it is for from the moment at which it is made."""

import threading
from typing import Any

import pytest

from hybrid.primitives.deferred_response import DeferredResponse, serve_caller


class Named:
    """A caller that sees its name on everything."""

    def __init__(self, name: str) -> None:
        self._name = name

    def wrap_result(self, value: Any) -> str:
        return f"{self._name}: {value}"

    def wrap_exception(self, error: Exception) -> str:
        return f"{self._name}: raised {error}"


def test_it_is_for_the_caller_that_was_served_when_it_was_made() -> None:
    with serve_caller(Named("first")):
        first: DeferredResponse[Any] = DeferredResponse()
    with serve_caller(Named("second")):
        second: DeferredResponse[Any] = DeferredResponse()
        first.set_result(1)
        second.set_exception(ValueError("two"))
    assert first.done()
    assert second.done()
    assert (first.wait(), second.wait()) == ("first: 1", "second: raised two")


def test_another_thread_may_complete_it() -> None:
    with serve_caller(Named("caller")):
        answer: DeferredResponse[Any] = DeferredResponse()
        thread = threading.Thread(target=lambda: answer.set_result(3))
        thread.start()
        thread.join(5.0)
    assert answer.done(), "to wait for it would have no end"
    assert answer.wait() == "caller: 3"


def test_where_nobody_is_served_it_is_a_future() -> None:
    with pytest.raises(KeyError), serve_caller(Named("before")):
        raise KeyError
    answer: DeferredResponse[int] = DeferredResponse()
    answer.set_result(4)
    failed: DeferredResponse[int] = DeferredResponse()
    failed.set_exception(ValueError("plain"))
    assert answer.wait() == 4
    with pytest.raises(ValueError, match="plain"):
        failed.wait()

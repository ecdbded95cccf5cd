"""The collector is off while modules are imported, and leaves alone what they have made."""

import gc
from collections.abc import Iterator

import pytest

from workers.module_imports import importing_much


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_the_collector_rests_and_then_goes_on() -> None:
    with importing_much():
        assert not gc.isenabled()
        made: list[list[int]] = [[]]
        assert made in gc.get_objects()
    assert gc.isenabled()
    assert not any(each is made for each in gc.get_objects()), "it is not looked at again"


def test_a_module_that_cannot_be_imported_leaves_the_collector_on() -> None:
    with pytest.raises(ModuleNotFoundError), importing_much():
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()

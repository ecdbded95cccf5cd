"""The table of upstream names: marks are read as pytest reads them, and the page says what they say."""

import re
from pathlib import Path

import pytest
from support.upstream import TESTS, describe, mistakes
from support.upstream_marks import Marked, MarkError, read_marks
from support.upstream_names import ALL_NAMES, NOT_APPLICABLE

pytest_plugins = ["pytester"]

PAGE = TESTS.parent / "docs/upstream.md"
WITHOUT_REASON = [name for name in ALL_NAMES if name not in NOT_APPLICABLE]


@pytest.fixture(scope="module")
def ours() -> dict[str, list[Marked]]:
    """The marks of all tests."""
    return read_marks(TESTS)


def test_every_upstream_name_has_a_test_or_a_reason(ours: dict[str, list[Marked]]) -> None:
    found = mistakes(ours)
    assert not found, "\n".join(found)


def test_the_page_is_up_to_date(ours: dict[str, list[Marked]]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == describe(ours), "run PYTHONPATH=tests python -m support.upstream > docs/upstream.md"
    assert all((PAGE.parent / link).is_file() for link in re.findall(r"\]\(([^)]+)\)", page))


def test_no_upstream_name_is_there_twice() -> None:
    assert len(set(ALL_NAMES)) == len(ALL_NAMES) > 100
    assert NOT_APPLICABLE.keys() <= set(ALL_NAMES)


DEVICES = """
import pytest

GPU = [pytest.mark.gpu, pytest.mark.skipif(True, reason="needs a CUDA device")]
SOME = ["cpu", pytest.param("cuda:0", marks=GPU)]

NEEDS_GPU = pytest.mark.gpu

def on_gpu(device):
    return pytest.param(device, marks=GPU)

def last(sizes):
    return last(sizes[1:]) if len(sizes) > 1 else sizes[0]
"""

SAMPLE = """
import pytest
from devices import GPU, NEEDS_GPU, SOME as DEVICES, last, on_gpu

pytestmark = [pytest.mark.upstream("of module")]
ONE: list = [pytest.param(["cuda:0", "cpu"], marks=pytest.mark.gpu)]

@pytest.mark.parametrize(argnames="size", argvalues=[1, last([1, 2])])
@pytest.mark.upstream("plain", "both")
def test_plain(size): ...

@pytest.mark.gpu
@pytest.mark.upstream("marked gpu", "both")
def test_gpu(): ...

@NEEDS_GPU
@pytest.mark.upstream("marked by a name")
def test_named(): ...

@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.upstream("some cases")
def test_some_cases(device): ...

@pytest.mark.parametrize("size", [1, last([1, 2])])
@pytest.mark.parametrize("device", ONE)
@pytest.mark.upstream("all cases")
def test_all_cases(device, size): ...

@pytest.mark.parametrize("device", ["cpu", on_gpu("cuda:0")])
@pytest.mark.upstream("made case")
def test_made_case(device): ...

@pytest.mark.upstream("decorated class")
class TestDecorated:
    pytestmark = pytest.mark.upstream("class with pytestmark")

    @pytest.mark.upstream("method")
    def test_method(self): ...

class TestGpu:
    pytestmark = [NEEDS_GPU]

    @pytest.mark.upstream("inherited gpu")
    def test_method(self): ...

    @pytest.mark.upstream("nested class")
    class TestNested:
        def test_method(self): ...

@pytest.mark.parametrize("device", [on_gpu("cuda:0"), on_gpu("cuda:1")])
@pytest.mark.upstream("both")
def test_both(device): ...
"""


@pytest.fixture
def sample(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini("[pytest]\nmarkers =\n    gpu\n    upstream(*names)\npythonpath = .")
    pytester.makepyfile(devices=DEVICES)
    return pytester


def test_marks_are_read_as_pytest_reads_them(sample: pytest.Pytester) -> None:
    sample.makepyfile(test_sample=SAMPLE)
    items, _ = sample.inline_genitems("-q")
    kinds: dict[str, set[bool]] = {}
    for item in items:
        is_gpu = item.get_closest_marker("gpu") is not None
        for name in (name for mark in item.iter_markers("upstream") for name in mark.args):
            kinds.setdefault(name, set()).add(is_gpu)
    assert len(kinds) == 13
    assert kinds == {
        name: {
            is_gpu
            for place in places
            for is_gpu, is_so in ((False, place.runs_on_cpu), (True, place.runs_on_gpu))
            if is_so
        }
        for name, places in read_marks(sample.path).items()
    }


def test_a_place_is_named_as_pytest_names_it(sample: pytest.Pytester) -> None:
    sample.makepyfile(test_sample=SAMPLE)
    places = read_marks(sample.path)
    assert [place.name for name in ("of module", "nested class", "both") for place in places[name]] == [
        *("", "TestGpu::TestNested", "test_plain", "test_gpu", "test_both")
    ]
    assert {place.file for of_name in places.values() for place in of_name} == {Path("test_sample.py")}


@pytest.mark.parametrize(
    ("file", "code", "line"),
    [
        ("test_a", "@MARK('x')\ndef helper(): ...\ndef test_it(): ...", 1),
        ("test_a", "def test_it():\n    @MARK('x')\n    def test_inner(): ...", 2),
        ("test_a", "@MARK('x')\nclass TestEmpty:\n    def helper(self): ...", 1),
        ("test_a", "@MARK('x')\nclass Helper:\n    def test_it(self): ...", 1),
        ("test_a", "pytestmark = MARK('x')", 1),
        ("conftest", "pytestmark = MARK('x')\ndef test_it(): ...", 1),
        ("test_a", "def helper(): ...\n\none = MARK('x')\ntwo = MARK('y')\nthree = MARK('z')", 3),
    ],
)
def test_a_mark_that_is_not_on_a_test_is_an_error(file: str, code: str, line: int, tmp_path: Path) -> None:
    (tmp_path / f"{file}.py").write_text(code.replace("MARK", "pytest.mark.upstream"))
    with pytest.raises(MarkError, match=rf"^{file}\.py:{line}: pytest\.mark\.upstream is not on a test$"):
        read_marks(tmp_path)


@pytest.mark.parametrize("argument", ["f'{y}'", "X", "*names", "1"])
def test_a_name_that_is_no_literal_is_an_error(argument: str, tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(f"@pytest.mark.upstream('x', {argument})\ndef test_it(): ...")
    with pytest.raises(MarkError, match=r"^test_a\.py:1: pytest\.mark\.upstream holds what is no literal$"):
        read_marks(tmp_path)


def place(name: str, runs_on_cpu: bool = True, runs_on_gpu: bool = False) -> Marked:
    return Marked(Path("unit/test_a.py"), name, runs_on_cpu, runs_on_gpu)


def test_mistakes_name_what_is_missing_unknown_or_there_for_nothing() -> None:
    complete = {name: [place("test_it")] for name in WITHOUT_REASON}
    assert mistakes(complete) == []
    (reasoned, *_), (first, *others) = NOT_APPLICABLE, WITHOUT_REASON
    assert mistakes({name: complete[name] for name in others}) == [f"{first} has no test"]
    assert mistakes(complete | {reasoned: [place("")]}) == [
        f"{reasoned} has tests, and a reason to have none"
    ]
    assert mistakes(complete | {"jit/test_none": [place("test_it")]}) == [
        "jit/test_none is no upstream name: unit/test_a.py::test_it"
    ]


@pytest.mark.parametrize(
    ("places", "state"),
    [
        ([place("a"), place("b")], "passes on CPU"),
        ([place("a"), place("b", runs_on_cpu=False, runs_on_gpu=True)], "passes on CPU; more on a GPU"),
        ([place("a", runs_on_gpu=True)], "passes on CPU; more on a GPU"),
        ([place("a", runs_on_cpu=False, runs_on_gpu=True)], "needs a GPU"),
        ([], "no test"),
    ],
)
def test_a_row_says_where_tests_are_and_where_they_run(places: list[Marked], state: str) -> None:
    links = "<br>".join(f"[test_a.py::{p.name}](../tests/unit/test_a.py)" for p in places)
    assert f"| `test_shared_module` | {links} | {state} |" in describe({"jit/test_shared_module": places})


def test_a_name_without_tests_shows_its_reason() -> None:
    page = describe({})
    for name, reason in NOT_APPLICABLE.items():
        assert f"| `{name.partition('/')[2]}` |  | does not apply: {reason} |" in page

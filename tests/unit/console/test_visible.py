"""Text out of files on a terminal."""

import io

import pytest
from rich.console import Console

from workers import cli
from workers.console.escaping import visible
from workers.console.terminal import TerminalView

HOSTILE = "a\x1b[31mb\x07\x00\x7f\x9b2J\u202ec\u2066\u2028\udc80"
SHOWN = r"a\x1b[31mb\x07\x00\x7f\x9b2J\u202ec\u2066\u2028\udc80"


def test_what_is_not_to_be_seen_is_escaped() -> None:
    assert visible(HOSTILE) == SHOWN
    assert visible("a\nb\tc\r") == r"a\nb\tc\r"
    for text in ("", "Zürich, 東京 🙂 é", "[red]x[/red]", r"back\\slash"):
        assert visible(text) == text
    assert all(visible(chr(i)).isprintable() for i in range(0xA0) if i != 0x20)


@pytest.mark.parametrize("is_live", [False, True])
def test_the_screen_shows_it_escaped(is_live: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_live, width=200, color_system=None)
    with TerminalView(console) as view:
        view.status(HOSTILE)
        view.note(HOSTILE)
    assert out.getvalue().count(SHOWN) >= 2
    assert not set("\x07\x00\x7f\x9b\u202e\u2066\u2028\udc80") & set(out.getvalue())


def test_an_error_shows_it_escaped(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(
            ["plan", "--set", "data.format=csv", "--set", "data.sparse=c", "--set", f"data.path={HOSTILE}"]
        )
    assert "\x1b" not in str(ended.value)
    assert r"\x1b[31m" in str(ended.value)

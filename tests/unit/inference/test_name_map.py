"""Names elsewhere to names of tables, and back."""

import pytest

from hybrid.errors import ConfigError
from hybrid.export.name_map import NameMap

ELSEWHERE = ["ebc.embedding_bags.user.weight", "ebc.embedding_bags.item.a.weight", "over.0.bias"]
TABLES = ["user", "item.a", "tags"]


def test_a_star_is_the_same_on_both_sides() -> None:
    names = NameMap.parse(["ebc.embedding_bags.*.weight=*"])
    found = names.sources(ELSEWHERE, TABLES, "w.pt")
    assert found == {"user": ELSEWHERE[0], "item.a": ELSEWHERE[1]}
    back = names.names(["user", "item.a"])
    assert back == found


def test_several_stars_and_plain_names() -> None:
    names = NameMap.parse(["m.*.t_*.w=*/*", "x=tags"])
    assert names.sources(["m.a.t_b.w", "x"], ["a/b", "tags"], "w.pt") == {"a/b": "m.a.t_b.w", "tags": "x"}


def test_tables_that_no_pair_names_keep_their_names() -> None:
    assert NameMap.parse(["users.weight=user"]).names(TABLES) == {
        "user": "users.weight",
        "item.a": "item.a",
        "tags": "tags",
    }


@pytest.mark.parametrize("text", ["user", "=user", "user=", "*.weight=user", "a=b*"])
def test_what_is_no_pair(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--map = .*: must be NAME=TABLE, with as many"):
        NameMap.parse([text])


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (
            ["embedding.*=*"],
            r"--map = 'embedding\.\*': fits none of the names in w\.pt: ebc\.e.*, over\.0\.bias",
        ),
        (["over.*=*"], r"makes 'over\.0\.bias' table '0\.bias', and there are item\.a, tags, user"),
        (
            ["ebc.embedding_bags.user.weight=user", "over.0.bias=user"],
            "makes both 'ebc.* and 'over.* table 'user'",
        ),
    ],
)
def test_a_map_that_does_not_fit_the_file(texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NameMap.parse(texts).sources(ELSEWHERE, TABLES, "w.pt")


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["a.*=x*"], r"--map = 'x\*': fits none of the names in the model: item\.a, tags, user"),
        (["tags=user"], "calls both 'user' and 'tags' 'tags'"),
    ],
)
def test_a_map_that_does_not_fit_the_model(texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NameMap.parse(texts).names(TABLES)

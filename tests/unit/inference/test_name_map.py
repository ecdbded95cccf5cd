"""Names of tensors in other programs to names of tables, and back."""

import pytest

from hybrid.errors import ConfigError
from hybrid.export.name_map import NameMap

TENSORS = ["ebc.embedding_bags.user.weight", "ebc.embedding_bags.item.a.weight", "over.0.bias"]
TABLES = ["user", "item.a", "tags"]


def test_a_star_is_the_same_text_on_both_sides() -> None:
    names = NameMap.parse(["ebc.embedding_bags.*.weight=*"])
    matches = names.match_tables(TENSORS, TABLES, "w.pt")
    assert matches == {"user": TENSORS[0], "item.a": TENSORS[1]}
    assert names.rename_tables(["user", "item.a"]) == matches


def test_several_stars_and_plain_names() -> None:
    names = NameMap.parse(["m.*.t_*.w=*/*", "x=tags"])
    matches = names.match_tables(["m.a.t_b.w", "x"], ["a/b", "tags"], "w.pt")
    assert matches == {"a/b": "m.a.t_b.w", "tags": "x"}


def test_tables_without_a_pair_keep_their_names() -> None:
    renamed = NameMap.parse(["users.weight=user", "other.*=*"]).rename_tables(["user", "50%"])
    assert renamed == {"user": "users.weight", "50%": "other.50%"}
    assert NameMap.parse(["users.weight=user"]).rename_tables(TABLES)["tags"] == "tags"


@pytest.mark.parametrize("text", ["user", "=user", "user=", "*.weight=user", "a=b*"])
def test_invalid_pairs(text: str) -> None:
    with pytest.raises(ConfigError, match="--map = "):
        NameMap.parse([text])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["embedding.*=*"], r"'embedding\.\*'.* w\.pt: ebc\.e.*, over\.0\.bias"),
        (["over.*=*"], r"'over\.0\.bias'.* '0\.bias'.* item\.a, tags, user"),
        (["ebc.embedding_bags.user.weight=user", "over.0.bias=user"], "'ebc.* and 'over.* table 'user'"),
    ],
)
def test_a_map_that_does_not_fit_the_file(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NameMap.parse(texts).match_tables(TENSORS, TABLES, "w.pt")


@pytest.mark.parametrize(
    ("texts", "message"), [(["a.*=x*"], r"'x\*'.* item\.a, tags, user"), (["tags=user"], "'tags'")]
)
def test_a_map_that_does_not_fit_the_model(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NameMap.parse(texts).rename_tables(TABLES)

"""Tables of other programs: their files, their names, and a checkpoint with their rows."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.trained import clicks_config, write_trained
from torch import Tensor, nn

from hybrid.checkpoint.checkpoint_folders import step_folder
from hybrid.checkpoint.checkpoint_manifest import shard_file
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import map_arrays, read_tensors
from hybrid.embedding import pretrained_by_position
from hybrid.embedding.pretrained_by_position import StoredTensor
from hybrid.errors import CheckpointError, ConfigError, DataError
from hybrid.export.name_map import NameMap
from hybrid.export.table_import import check_fit, stored_tensors, write_imported

TENSORS = ["ebc.embedding_bags.user.weight", "ebc.embedding_bags.item.a.weight", "over.0.bias"]
TABLES = ["user", "item.a", "tags"]


def of(tensor: Tensor) -> StoredTensor:
    return StoredTensor(tuple(tensor.shape), lambda start, stop: tensor[start:stop])


@pytest.fixture
def stored(tmp_path: Path) -> Checkpoint:
    """A checkpoint with two shards per table, and Adagrad's state."""
    run = write_trained(tmp_path / "run", clicks_config(tmp_path))
    return Checkpoint.open(step_folder(run, 1))


def rows_like(stored: Checkpoint, table: str, dtype: torch.dtype = torch.float32) -> Tensor:
    num_rows, dim, _ = stored.manifest.tables[table]
    return torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(9)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_are_replaced_and_their_state_is_reset(
    stored: Checkpoint, tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained_by_position, "_BLOCK_BYTES", 8 * 4 * 3)  # three rows of a shard
    num_rows, dim, count = stored.manifest.tables["user"]
    assert (count, num_rows > 12) == (2, True)
    rows_RD = rows_like(stored, "user", dtype)
    write_imported(stored, {"u": of(rows_RD)}, {"user": "u"}, tmp_path / "new")
    new = Checkpoint.open(tmp_path / "new")
    new.manifest.verify(new.folder)
    assert torch.equal(new.read_rows("user", (num_rows, dim)), rows_RD.float())
    assert torch.equal(
        new.read_rows("item", new.manifest.tables["item"][:2]),
        stored.read_rows("item", stored.manifest.tables["item"][:2]),
    )
    assert not read_tensors(Path(str(new.folder)) / shard_file("user", 1, 2))["sum"].any()


def test_the_state_of_a_table_that_was_trained_is_dropped(stored: Checkpoint, tmp_path: Path) -> None:
    rows_RD = rows_like(stored, "user")
    path = Path(str(stored.folder)) / shard_file("user", 0, 2)
    arrays = map_arrays(path, is_writable=True)
    arrays["sum"][:] = 7.0
    del arrays
    write_imported(stored, {"u": of(rows_RD)}, {"user": "u"}, tmp_path / "new")
    assert not read_tensors(tmp_path / "new" / shard_file("user", 0, 2))["sum"].any()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, 4), r"'u' is 3 x 4, .*table 'user' of .*step-00000001 is \d+ x 4"),
        (torch.zeros(()), "'u' is one value, .*table 'user'"),
    ],
)
def test_a_tensor_of_another_shape(stored: Checkpoint, tensor: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_fit(stored, {"u": of(tensor)}, {"user": "u"})


def test_a_tensor_of_integers(stored: Checkpoint) -> None:
    with pytest.raises(DataError, match=r"'u' .*int8.* table 'user'"):
        check_fit(stored, {"u": of(rows_like(stored, "user", torch.int8))}, {"user": "u"})


def test_a_failed_import_leaves_no_files(stored: Checkpoint, tmp_path: Path) -> None:
    def fails(start: int, stop: int) -> Tensor:
        raise DataError("the file is gone")

    tensor = StoredTensor(stored.manifest.tables["user"][:2], fails)
    with pytest.raises(DataError, match="is gone"):
        write_imported(stored, {"u": tensor}, {"user": "u"}, tmp_path / "new")
    assert not list(tmp_path.glob("new*"))
    with pytest.raises(CheckpointError, match="exists already"):
        write_imported(stored, {}, {}, Path(str(stored.folder)))


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


class Bags(nn.Module):
    """Tables with the names of TorchRec's EmbeddingBagCollection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_bags = nn.ModuleDict({"user": nn.EmbeddingBag(7, 3), "item": nn.EmbeddingBag(4, 3)})


class OpenedError(Exception):
    """Raised if the file is opened."""


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("ran",)


def check_user(path: Path, name: str, expected: torch.Tensor) -> None:
    with stored_tensors(path) as tensors:
        assert tensors[name].shape == (7, 3)
        assert torch.equal(tensors[name].rows(2, 5), expected[2:5])


def test_nested_state_dicts(tmp_path: Path) -> None:
    bags = Bags()
    torch.save({"epoch": 3, "model": bags.state_dict(), "lr": [0.1]}, tmp_path / "w.pt")
    name = "embedding_bags.user.weight"
    check_user(tmp_path / "w.pt", f"model.{name}", bags.state_dict()[name])


def test_safetensors(tmp_path: Path) -> None:
    bags = Bags()
    save_file(bags.state_dict(), tmp_path / "w.safetensors")
    name = "embedding_bags.user.weight"
    check_user(tmp_path / "w.safetensors", name, bags.state_dict()[name])


def test_nothing_but_tensors_is_unpickled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.zeros(2, 2), "x": Harmful()}, tmp_path / "w.pt")
    message = "holds more than tensors, which is not unpickled; save a state_dict"
    with pytest.raises(DataError, match=message), stored_tensors(tmp_path / "w.pt"):
        raise OpenedError
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["none.pt", "none.safetensors", "text.pt", "text.safetensors"])
def test_unreadable_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "text.pt").write_text("no tensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(DataError, match=f"{name}: "), stored_tensors(tmp_path / name):
        raise OpenedError

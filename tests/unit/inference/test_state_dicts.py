"""Tensors of other programs by name; nothing else is unpickled."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hybrid.errors import DataError
from hybrid.export.table_import import stored_tensors


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

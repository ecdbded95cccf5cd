"""Dense nets and their optimizers through files and back."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hybrid.checkpoint.checkpoint_manifest import DENSE_FILE
from hybrid.checkpoint.tensor_file import load_state, pack_dense, unpack_dense, write_tensors
from hybrid.dense.dense_optimizer import make_optimizer
from hybrid.errors import CheckpointError


@pytest.mark.parametrize("name", ["optimizer.x.step", "optimizer.-1.step", "optimizer.", "optimizer.²"])
def test_a_state_of_no_parameter_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"^'{name}' is not the state of an optimizer$"):
        unpack_dense({name: torch.zeros(1)})


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, first: int, num_steps: int) -> None:
    for step in range(first, first + num_steps):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        module(torch.randn(6, 4, generator=generator)).square().sum().backward()
        optimizer.step()


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)


@pytest.mark.parametrize(
    "name", ["SGD", "momentum", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]
)
def test_training_goes_on_from_a_file_bit_for_bit(tmp_path: Path, name: str) -> None:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        return momentum(module) if name == "momentum" else make_optimizer(module.parameters(), name, 0.01)

    straight = net()
    optimizer = make(straight)
    train(straight, optimizer, 0, 3)
    packed = pack_dense(straight.state_dict(), optimizer.state_dict()["state"])
    train(straight, optimizer, 3, 3)  # training goes on while the copies are written
    write_tensors(tmp_path, DENSE_FILE, packed)

    resumed = net()
    again = make(resumed)
    state, slots = unpack_dense(load_file(tmp_path / DENSE_FILE))
    load_state(resumed, state, tmp_path)
    again.load_state_dict({"state": slots, "param_groups": again.state_dict()["param_groups"]})
    train(resumed, again, 3, 3)
    assert_same(resumed.state_dict(), straight.state_dict())
    for index, slot in optimizer.state_dict()["state"].items():
        present = {key: value for key, value in slot.items() if value is not None}
        if present:
            assert_same(again.state_dict()["state"][index], present)


def assert_same(first: Mapping[str, object], second: Mapping[str, object]) -> None:
    assert first.keys() == second.keys()
    for key, value in second.items():
        assert torch.equal(torch.as_tensor(first[key]), torch.as_tensor(value)), key


def test_a_state_of_another_net_is_an_error_of_one_line(tmp_path: Path) -> None:
    state = net().state_dict()
    other = nn.Sequential(nn.Linear(4, 6))
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: is of another model: .*size mismatch") as caught:
        load_state(other, state, tmp_path)
    assert "\n" not in str(caught.value)

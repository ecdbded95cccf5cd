"""Optimizers of dense nets: classes of torch.optim, options, parameter groups, state and schedules."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hybrid.checkpoint.tensor_file import pack_dense, unpack_dense, write_tensors
from hybrid.config import DenseGroupSection, ScheduleSection
from hybrid.dense.dense_optimizer import DenseOptimizer, make_optimizer, squared_norm
from hybrid.errors import CheckpointError, ConfigError
from hybrid.updates.update_rules import Schedule

CLASSES = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}
REFUSED = {"SparseAdam": "takes sparse gradients", "LBFGS": "evaluates the loss several times"}
TRAINING = sorted(CLASSES.keys() - REFUSED.keys())


def net(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4, bias=bias), nn.Tanh(), nn.Linear(4, 1, bias=bias))


def train(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    input_BD = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        optimizer.zero_grad()
        module(input_BD).square().mean().backward()
        optimizer.step()
    return list(module.parameters())


@pytest.mark.parametrize(
    ("name", "options", "arguments"),
    [
        *((name, (), {}) for name in TRAINING),
        ("SGD", ("momentum = 0.9", "nesterov = true"), {"momentum": 0.9, "nesterov": True}),
        ("Adam", ("betas = [0.5, 0.9]",), {"betas": (0.5, 0.9)}),
        ("Adagrad", ("foreach = true",), {"foreach": True}),
        ("Adafactor", ("eps = [1e-30, 1e-3]", "d = 2"), {"eps": (1e-30, 1e-3), "d": 2}),
        ("Muon", ('adjust_lr_fn = "match_rms_adamw"',), {"adjust_lr_fn": "match_rms_adamw"}),
    ],
)
def test_every_optimizer_equals_torch(name: str, options: tuple[str, ...], arguments: dict[str, Any]) -> None:
    bias = name != "Muon"
    ours, theirs = net(bias), net(bias)
    optimizer = make_optimizer(ours, name, 0.01, options)
    assert optimizer.defaults | arguments | {"lr": 0.01} == optimizer.defaults
    trained = train(ours, optimizer)
    reference = train(theirs, CLASSES[name](theirs.parameters(), lr=0.01, **arguments))  # type: ignore[call-arg]
    torch.testing.assert_close(trained, reference, rtol=0, atol=0)
    assert not any(map(torch.equal, trained, net(bias).parameters()))


@pytest.mark.parametrize(
    ("name", "options", "rule"),
    [
        ("adamw", [], "is not a class of torch.optim; choose from ASGD, .*SGD$"),
        ("Optimizer", [], "is not a class"),  # the base class, which optimizes nothing
        *((name, [], rule) for name, rule in REFUSED.items()),
        ("Muon", [], "cannot train this net; .*2D.*Size"),
        ("SGD", ["momentum"], "must be arguments"),
        ("SGD", ["momentum = 0.5", "momentum = 0.9"], "must be arguments"),
        ("SGD", ["betas = [0.9, 0.99]"], "betas is not an argument"),
        ("SGD", ["lr = 1"], "lr is dense.learning_rate"),
        ("SGD", ["maximize = true"], "maximize would raise the loss"),
        ("SGD", ["params = 1"], "params is not an argument of"),
        ("SGD", ['nesterov = "no"'], "nesterov must be true or false"),
        ("SGD", ["momentum = -1"], "torch.optim.SGD refuses this: Invalid momentum"),
        ("Adam", ["capturable = true"], "torch.optim.Adam refuses this: "),
        # torch checks these only in a step.
        ("Muon", ["ns_steps = 100"], "torch.optim.Muon refuses this: Number of steps"),
    ],
)
def test_invalid_name_or_option_raises_an_error(name: str, options: list[str], rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_optimizer(net(bias=name != "Muon" or not options), name, 0.01, options)
    assert (caught.value.key, caught.value.value) == ("dense.optimizer", options or name)
    assert re.match(rule, caught.value.rule)
    assert not any(refused in caught.value.rule for refused in REFUSED)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", TRAINING)
def test_every_optimizer_resumes_from_its_state(name: str, tmp_path: Path) -> None:
    undisturbed, stored = (net(bias=name != "Muon") for _ in range(2))
    optimizer = make_optimizer(undisturbed, name, 0.01)
    train(undisturbed, optimizer)
    stored.load_state_dict(undisturbed.state_dict())
    packed = pack_dense({}, optimizer.state_dict()["state"])
    expected = train(undisturbed, optimizer)  # training continues while the copies are written
    write_tensors(tmp_path, "dense", packed)
    _, state = unpack_dense(load_file(tmp_path / "dense"))
    resumed = DenseOptimizer(make_optimizer(stored, name, 0.01), Schedule())
    resumed.load(state, tmp_path)
    torch.testing.assert_close(train(stored, resumed.optimizer), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("place", "shape"), [(4, [4, 3]), (0, [4]), (0, [4, 3, 1]), (0, [3, 4]), (1, [5]), (1, [2])]
)
def test_state_of_other_parameters_raises_an_error(place: int, shape: list[int], tmp_path: Path) -> None:
    optimizer = DenseOptimizer(make_optimizer(net(), "Adam", 0.01), Schedule())
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: .* state {place}"):
        optimizer.load({place: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(shape)}}, tmp_path)


class TestDenseOptimizer:
    def test_step_uses_only_the_given_gradients_and_does_not_change_them(self) -> None:
        used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        unused.grad = torch.ones(2)  # of an earlier step
        optimizer, gradient = torch.optim.SGD([used, unused], lr=0.5), torch.tensor([1.0, 2.0])
        DenseOptimizer(optimizer, Schedule()).step(0, {used: gradient}, scale=0.5)
        assert used.tolist() == [0.75, 0.5]
        assert gradient.tolist() == [1.0, 2.0]
        assert unused.tolist() == [1.0, 1.0]
        assert used.grad is None
        assert unused.grad is None

    def test_learning_rates_follow_the_schedule(self) -> None:
        first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 3.0}]
        section = ScheduleSection(kind="step(decay_every = 10, decay_factor = 0.5)")
        optimizer = DenseOptimizer(torch.optim.SGD(groups, lr=1.0), Schedule(section))
        for step in (20, 0, 10):  # as after a checkpoint, and in no order
            optimizer.step(step, {first: torch.ones(1), second: torch.ones(1)})
        assert (first.item(), second.item()) == (-1.75, -5.25)

    def test_load_keeps_the_configured_options(self) -> None:
        def stepped(rate: float) -> torch.optim.Optimizer:
            parameter = nn.Parameter(torch.ones(2))
            optimizer = torch.optim.Adam([parameter], lr=rate)
            DenseOptimizer(optimizer, Schedule()).step(0, {parameter: torch.ones(2)})
            return optimizer

        stored, optimizer = stepped(0.5).state_dict(), stepped(0.25)
        DenseOptimizer(optimizer, Schedule()).load(stored["state"], Path("checkpoint"))
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], stored["state"][0]["exp_avg"])

    def test_squared_norm(self) -> None:
        gradients = [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])]
        assert squared_norm(gradients) == 169.0
        assert squared_norm([]) == 0.0
        # Of parts beyond float32, and of a norm that is.
        assert squared_norm([torch.full((10,), 1e30)]) == pytest.approx(1e61)
        assert squared_norm([torch.full((4,), 3e38), torch.ones(3)]) == pytest.approx(4 * 9e76)
        assert math.isnan(squared_norm([torch.tensor([1.0, math.nan])]))


def two_stage_net() -> nn.Module:
    return nn.ModuleDict({"bottom": nn.Linear(2, 3), "head": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))})


def group(*parameters: str, rate: float | None = None, options: tuple[str, ...] = ()) -> DenseGroupSection:
    rates = () if rate is None else (f"lr = {rate}",)
    return DenseGroupSection(parameters=parameters, optimizer_options=(*rates, *options))


def test_parameter_groups_keep_the_order_of_parameters() -> None:
    module = two_stage_net()
    sections = {
        "slow": group("head.*.weight", rate=0.01),
        "plain": group("*.bias", options=("weight_decay = 0",)),
    }
    optimizer = make_optimizer(module, "SGD", 0.5, ["weight_decay = 0.1", "momentum = 0.9"], sections)
    flat = [parameter for each in optimizer.param_groups for parameter in each["params"]]
    assert all(a is b for a, b in zip(flat, module.parameters(), strict=True))
    settings = {
        id(parameter): (each["lr"], each["weight_decay"], each["momentum"])
        for each in optimizer.param_groups
        for parameter in each["params"]
    }
    assert {name: settings[id(parameter)] for name, parameter in module.named_parameters()} == {
        "bottom.weight": (0.5, 0.1, 0.9),
        "bottom.bias": (0.5, 0, 0.9),
        "head.0.weight": (0.01, 0.1, 0.9),
        "head.0.bias": (0.5, 0, 0.9),
        "head.1.weight": (0.01, 0.1, 0.9),
        "head.1.bias": (0.5, 0, 0.9),
    }


def test_remote_parameter_names_have_a_prefix() -> None:
    sections = {"remote": group("remote.0.*", rate=0.1), "biases": group("head.*.bias", "*.1.bias", rate=0.2)}

    def rates(net: nn.Module, is_remote: bool) -> list[float]:
        optimizer = make_optimizer(net, "SGD", 0.5, (), sections, is_remote=is_remote)
        return [each["lr"] for each in optimizer.param_groups for _ in each["params"]]

    assert rates(two_stage_net(), is_remote=False) == [0.5, 0.5, 0.5, 0.2, 0.5, 0.2]
    remote = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert rates(remote, is_remote=True) == [0.1, 0.1, 0.5, 0.2]


def test_invalid_group_raises_an_error() -> None:
    def refusal(is_remote: bool = False, **sections: DenseGroupSection) -> str:
        with pytest.raises(ConfigError) as caught:
            make_optimizer(nn.Linear(1, 1), "SGD", 0.5, (), sections, is_remote=is_remote)
        return str(caught.value)

    assert refusal(a=group("head.*")).startswith("dense_groups.a.parameters = 'head.*': ")
    assert refusal(True, a=group("remote.head.*")).endswith("remote.weight, remote.bias")
    assert refusal(a=group("weight"), b=group("w*")).startswith("dense_groups.b.parameters = 'w*': ")
    for option in ("momentun = 1", "weight_decay = -1.0"):
        key = f"dense_groups.a.optimizer_options = [{option!r}]"
        assert refusal(a=group("bias", options=(option,))).startswith(f"{key}: ")

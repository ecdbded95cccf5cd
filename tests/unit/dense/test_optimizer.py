"""make_optimizer: every class of torch.optim trains a small net, or is refused and says why."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hybrid.checkpoint.tensor_file import pack_dense, unpack_dense
from hybrid.config import ScheduleSection
from hybrid.dense.dense_optimizer import DenseOptimizer, make_optimizer, squared_norm
from hybrid.errors import CheckpointError, ConfigError
from hybrid.protocol.learning_rate_schedule import Schedule

CLASSES = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}
REFUSED = {"SparseAdam": "takes sparse gradients only", "LBFGS": "evaluates the loss several times"}
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
    ("name", "hint"),
    [
        ("adamw", "did you mean 'AdamW'"),
        ("Adan", "choose from ASGD, .*SGD$"),
        ("lr_scheduler", "choose from"),
        ("Optimizer", "choose from"),  # the base class, which optimizes nothing
        ("__name__", "choose from"),
    ],
)
def test_other_names_are_refused_with_a_hint(name: str, hint: str) -> None:
    rule = rf"^dense\.optimizer = '{name}': is not a class of torch.optim; {hint}"
    with pytest.raises(ConfigError, match=rule) as caught:
        make_optimizer(net().parameters(), name, 0.1)
    assert not any(refused in str(caught.value) for refused in REFUSED)


@pytest.mark.parametrize(
    ("name", "rule"), [*REFUSED.items(), ("Muon", "cannot train this net; take another class .*2D.*Size")]
)
def test_classes_that_cannot_step_this_net_are_refused(name: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"^dense.optimizer = '{name}': {rule}"):
        make_optimizer(net().parameters(), name, 0.01)


@pytest.mark.parametrize(
    ("name", "options", "arguments"),
    [
        *((name, (), {}) for name in TRAINING),
        ("SGD", ("momentum = 0.9", "nesterov = true"), {"momentum": 0.9, "nesterov": True}),
        ("Adam", ("betas = [0.5, 0.9]",), {"betas": (0.5, 0.9)}),
        ("AdamW", ("weight_decay=1", "amsgrad=true"), {"weight_decay": 1, "amsgrad": True}),
        ("Adam", ("fused = true",), {"fused": True}),
        ("Adagrad", ("foreach = true",), {"foreach": True}),
        ("Adafactor", ("eps = [1e-30, 1e-3]", "d = 2"), {"eps": (1e-30, 1e-3), "d": 2}),
        ("Rprop", ("step_sizes = [1e-6, 1]",), {"step_sizes": (1e-6, 1)}),
        ("Muon", ('adjust_lr_fn = "match_rms_adamw"',), {"adjust_lr_fn": "match_rms_adamw"}),
    ],
)
def test_every_class_trains_a_net_as_torch_does_and_takes_its_arguments_as_options(
    name: str, options: tuple[str, ...], arguments: dict[str, Any]
) -> None:
    bias = name != "Muon"
    ours, theirs = net(bias), net(bias)
    optimizer = make_optimizer(ours.parameters(), name, 0.01, options)
    assert optimizer.defaults | arguments | {"lr": 0.01} == optimizer.defaults
    trained = train(ours, optimizer)
    reference = train(theirs, CLASSES[name](theirs.parameters(), lr=0.01, **arguments))  # type: ignore[call-arg]
    torch.testing.assert_close(trained, reference, rtol=0, atol=0)
    assert not any(map(torch.equal, trained, net(bias).parameters()))


NOT_AN_OPTION = 'must hold texts such as "momentum = 0.9"'
NOT_A_VALUE = "must be true, false, a finite number, text, or a list"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("SGD", ["momentum"], f"'momentum': {NOT_AN_OPTION}"),
        ("SGD", ["momentum = fast"], f"'momentum = fast': {NOT_AN_OPTION}"),
        ("SGD", [""], f"'': {NOT_AN_OPTION}"),
        ("SGD", ["momentum = 1\nnesterov = true"], f"'momentum = 1\\nnesterov = true': {NOT_AN_OPTION}"),
        ("SGD", ["momentum = nan"], f"'momentum = nan': momentum {NOT_A_VALUE}"),
        ("SGD", ["momentum = inf"], f"'momentum = inf': momentum {NOT_A_VALUE}"),
        ("Adam", ["betas = [0.9, nan]"], f"'betas = [0.9, nan]': betas {NOT_A_VALUE}"),
        ("SGD", ["momentum = 2026-01-01"], f"'momentum = 2026-01-01': momentum {NOT_A_VALUE}"),
        ("SGD", ["momentum = {a = 1}"], f"'momentum = {{a = 1}}': momentum {NOT_A_VALUE}"),
        ("SGD", ["[momentum]"], f"'[momentum]': momentum {NOT_A_VALUE}"),
        (
            "SGD",
            ["betas = [0.9, 0.99]"],
            "'betas = [0.9, 0.99]': betas is not an argument of torch.optim.SGD; "
            "choose from momentum, dampening, weight_decay, nesterov, foreach, fused",
        ),
        ("SGD", ["lr = 1"], "'lr = 1': lr is dense.learning_rate"),
        ("SGD", ["maximize = true"], "'maximize = true': maximize would raise the loss"),
        (
            "SGD",
            ["differentiable = true"],
            "'differentiable = true': differentiable is for gradients through",
        ),
        ("Adam", ["capturable = true"], "'capturable = true': capturable is for CUDA graphs"),
        ("SGD", ["capturable = true"], "'capturable = true': capturable is not an argument of"),
        ("SGD", ["params = 1"], "'params = 1': params is not an argument of"),
        ("SGD", ["momentum = 0.5", "momentum = 0.9"], "'momentum = 0.9': must give momentum once"),
        ("SGD", ["momentum = true"], "'momentum = true': momentum must be a number, as its default 0 is"),
        ("SGD", ['nesterov = "no"'], "'nesterov = \"no\"': nesterov must be true or false"),
        ("Adam", ["betas = 0.9"], "'betas = 0.9': betas must be a list, as its default (0.9, 0.999) is"),
        ("SGD", ["momentum = -1"], "['momentum = -1']: torch.optim.SGD refuses this: Invalid momentum"),
        ("SGD", ["nesterov = true"], "['nesterov = true']: torch.optim.SGD refuses this: Nesterov momentum"),
        ("Adam", ["betas = [0.9]"], "['betas = [0.9]']: torch.optim.Adam refuses this: "),
        ("Adam", ["betas = [2.0, 0.9]"], "['betas = [2.0, 0.9]']: torch.optim.Adam refuses"),
        ("Adam", ['betas = ["a", "b"]'], '[\'betas = ["a", "b"]\']: torch.optim.Adam refuses this: '),
        # torch looks at these only when it steps.
        ("Muon", ["ns_steps = 100"], "['ns_steps = 100']: torch.optim.Muon refuses this: Number of steps"),
        ("Muon", ["ns_steps = 1.5"], "['ns_steps = 1.5']: torch.optim.Muon refuses this: "),
    ],
)
def test_options_that_the_class_does_not_take_are_refused(
    name: str, options: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_optimizer(net(bias=name != "Muon").parameters(), name, 0.01, options)
    assert str(caught.value).startswith(f"dense.optimizer = {message}")
    assert "\n" not in str(caught.value)


def test_trying_the_options_leaves_the_net_alone() -> None:
    module = net()
    optimizer = make_optimizer(module.parameters(), "Adam", 0.5, ["betas = [0.5, 0.9]"])
    assert not optimizer.state
    torch.testing.assert_close([*module.parameters()], [*net().parameters()], rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("name", TRAINING)
def test_every_class_goes_on_from_its_state(name: str, tmp_path: Path) -> None:
    undisturbed, stored = (net(bias=name != "Muon") for _ in range(2))
    optimizer = make_optimizer(undisturbed.parameters(), name, 0.01)
    train(undisturbed, optimizer)
    stored.load_state_dict(undisturbed.state_dict())
    _, state = unpack_dense(pack_dense({}, optimizer.state_dict()["state"]))
    resumed = DenseOptimizer(make_optimizer(stored.parameters(), name, 0.01), Schedule())
    resumed.load(state, tmp_path)
    trained = train(stored, resumed.optimizer)
    torch.testing.assert_close(trained, train(undisturbed, optimizer), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("place", "shape"), [(4, [4, 3]), (0, [4]), (0, [4, 3, 1]), (0, [3, 4]), (1, [5]), (1, [2])]
)
def test_state_of_other_parameters_is_refused(place: int, shape: list[int], tmp_path: Path) -> None:
    optimizer = DenseOptimizer(make_optimizer(net().parameters(), "Adam", 0.01), Schedule())
    message = f"^{tmp_path}: is of another model: optimizer state {place} does not fit$"
    with pytest.raises(CheckpointError, match=message):
        optimizer.load({place: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(shape)}}, tmp_path)


class TestDenseOptimizer:
    def test_it_steps_with_the_gradients_that_it_is_given(self) -> None:
        used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        unused.grad = torch.ones(2)  # left by somebody else; not of this step
        optimizer = DenseOptimizer(torch.optim.SGD([used, unused], lr=0.5), Schedule())
        optimizer.step(0, {used: torch.tensor([1.0, 2.0])})
        assert used.tolist() == [0.5, 0.0]
        assert unused.tolist() == [1.0, 1.0]
        assert used.grad is None
        assert unused.grad is None

    def test_gradients_are_scaled_and_left_as_they_are(self) -> None:
        parameter, gradient = nn.Parameter(torch.ones(2)), torch.tensor([1.0, 2.0])
        optimizer = DenseOptimizer(torch.optim.SGD([parameter], lr=0.5), Schedule())
        optimizer.step(0, {parameter: gradient}, scale=0.5)
        assert parameter.tolist() == [0.75, 0.5]
        assert gradient.tolist() == [1.0, 2.0]

    def test_rates_follow_the_schedule_by_the_number_of_the_step(self) -> None:
        first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 3.0}]
        section = ScheduleSection(kind="step(decay_every = 10, decay_factor = 0.5)")
        optimizer = DenseOptimizer(torch.optim.SGD(groups, lr=1.0), Schedule(section))
        for step in (20, 0, 10):  # as after a checkpoint, and in no order
            optimizer.step(step, {first: torch.ones(1), second: torch.ones(1)})
        assert (first.item(), second.item()) == (-1.75, -5.25)

    def test_a_checkpoint_brings_states_and_no_settings(self) -> None:
        def stepped(rate: float) -> torch.optim.Optimizer:
            parameter = nn.Parameter(torch.ones(2))
            optimizer = torch.optim.Adam([parameter], lr=rate)
            DenseOptimizer(optimizer, Schedule()).step(0, {parameter: torch.ones(2)})
            return optimizer

        stored, optimizer = stepped(0.5).state_dict(), stepped(0.25)
        DenseOptimizer(optimizer, Schedule()).load(stored["state"], Path("checkpoint"))
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], stored["state"][0]["exp_avg"])

    def test_the_norm_of_gradients(self) -> None:
        gradients = [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])]
        assert squared_norm(gradients) == 169.0
        assert squared_norm([]) == 0.0
        # Of parts beyond float32, and of a norm that is.
        assert squared_norm([torch.full((10,), 1e30)]) == pytest.approx(1e61)
        assert squared_norm([torch.full((4,), 3e38), torch.ones(3)]) == pytest.approx(4 * 9e76)
        assert math.isnan(squared_norm([torch.tensor([1.0, math.nan])]))

"""Parameters that sections [dense_groups.NAME] name, and what is refused."""

import pytest
from torch import nn

from hybrid.config import DenseGroupSection
from hybrid.dense.dense_optimizer import make_optimizer, parameter_groups
from hybrid.errors import ConfigError


def net() -> nn.Module:
    return nn.ModuleDict({"bottom": nn.Linear(2, 3), "head": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))})


def group(*parameters: str, rate: float | None = None, options: tuple[str, ...] = ()) -> DenseGroupSection:
    rates = () if rate is None else (f"lr = {rate}",)
    return DenseGroupSection(parameters=parameters, optimizer_options=(*rates, *options))


def test_parameters_keep_their_order_and_have_what_their_group_says() -> None:
    module = net()
    sections = {
        "slow": group("head.*.weight", rate=0.01),
        "plain": group("*.bias", options=("weight_decay = 0",)),
    }
    groups = parameter_groups(module.named_parameters(), sections, is_remote=False)
    optimizer = make_optimizer(
        module.parameters(), "SGD", 0.5, ["weight_decay = 0.1", "momentum = 0.9"], groups
    )
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


def test_names_of_the_remote_net_begin_with_a_word_of_their_own() -> None:
    sections = {"remote": group("remote.0.*", rate=0.1), "biases": group("head.*.bias", "*.1.bias")}
    local = parameter_groups(net().named_parameters(), sections, is_remote=False)
    assert [len(each.parameters) for each in local] == [0, 2]
    remote = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    there = parameter_groups(remote.named_parameters(), sections, is_remote=True)
    assert [len(each.parameters) for each in there] == [2, 1]


def test_what_names_nothing_or_what_another_names_is_refused() -> None:
    def refusal(is_remote: bool = False, **sections: DenseGroupSection) -> str:
        with pytest.raises(ConfigError) as caught:
            parameter_groups(nn.Linear(1, 1).named_parameters(), sections, is_remote=is_remote)
        return str(caught.value)

    assert refusal(a=group("head.*")) == (
        "dense_groups.a.parameters = 'head.*': names no parameter; there are weight, bias"
    )
    assert refusal(True, a=group("remote.head.*")).endswith("there are remote.weight, remote.bias")
    assert refusal(a=group("weight"), b=group("w*")) == (
        "dense_groups.b.parameters = 'w*': must leave out weight, which dense_groups.a names"
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("momentun = 1", r"momentun is not an argument of torch\.optim\.SGD; choose from"),
        ("weight_decay = -1.0", "torch.optim.SGD refuses this: Invalid weight_decay"),
    ],
)
def test_options_are_those_of_the_class(option: str, message: str) -> None:
    module = nn.Linear(1, 1)
    groups = parameter_groups(
        module.named_parameters(), {"a": group("bias", options=(option,))}, is_remote=False
    )
    with pytest.raises(ConfigError, match=rf"^dense_groups\.a\.optimizer_options = .*: {message}"):
        make_optimizer(module.parameters(), "SGD", 0.5, (), groups)

"""The file of costs: what is written can be read, and what is not right is refused in one line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid.errors import ConfigError
from workers.planning.costs import MEASURED, Costs, cost


def test_what_is_written_can_be_read(priced: Callable[..., Costs], tmp_path: Path) -> None:
    costs = priced({"step": 0.5, "byte": 1.25e-9}, {"row": 2e-8}, 0.875)
    costs.write(tmp_path / "costs.toml")
    assert Costs.read(tmp_path / "costs.toml") == costs


def test_the_package_has_costs() -> None:
    costs = Costs.read()
    assert 0.5 < costs.busy <= 1
    for seconds in (costs.trainer_seconds, costs.worker_seconds):
        assert 0 < seconds["socket_message"] < seconds["rpc_message"] < 0.01


def test_a_cost_is_a_sum_over_terms() -> None:
    assert cost({"step": 2.0, "byte": 0.5}, {"step": 1.0, "byte": 10.0, "row": 99.0}) == 7.0


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("busy = ", "busy ", "is not TOML: "),
        ("busy = ", "idle = ", "must hold busy, origin, trainer_bytes, "),
        ("busy = ", "busy = 1", "must hold busy, origin, trainer_bytes, "),
        ("socket_message = ", "message = ", "[trainer_seconds] must hold step, socket_message, "),
        ("socket_message = ", "socket_message = -", "[trainer_seconds] must hold step, socket_message, "),
        ("row = ", "row = '1' # ", "[worker_seconds] must hold step, socket_message, "),
    ],
)
def test_a_file_that_is_not_right(old: str, new: str, rule: str, tmp_path: Path) -> None:
    text = MEASURED.read_text()
    assert old in text
    path = tmp_path / "costs.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        Costs.read(path)
    assert str(caught.value).startswith(f"--costs = '{path}': {rule}")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.toml': cannot be read: No such file or directory$"):
        Costs.read(tmp_path / "nowhere.toml")

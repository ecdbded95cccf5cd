"""What the master may create on other roles."""

from functools import partial

from hybrid.engine.matmul_trial import MatmulTrial
from hybrid.security.allow_list import Allowed
from hybrid.user_code.function_names import name_of
from workers.controller.deployment import CREATED, created_with
from workers.controller.remote_trainer import Trainer
from workers.controller.trainer_script import Script

SETTINGS = ["dense.device=cpu"]


def test_what_goes_by_the_configuration_has_what_its_role_was_given() -> None:
    created = created_with(SETTINGS)
    completed = {each.func: each.keywords for each in created if isinstance(each, partial)}
    assert completed == {each: {"settings": SETTINGS} for each in (MatmulTrial, Script, Trainer)}
    plain = [each for each in created if not isinstance(each, partial)]
    assert plain == [each for each in CREATED if each not in completed]


def test_it_is_asked_for_by_the_name_of_what_it_completes() -> None:
    made = Allowed((), [partial(dict, settings=SETTINGS)])._to_create(name_of(dict))
    assert made(index=0) == {"index": 0, "settings": SETTINGS}

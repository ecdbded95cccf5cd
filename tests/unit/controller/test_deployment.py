"""What the master may construct on other roles."""

from workers.controller.remote_trainer import Trainer
from workers.controller.user_code_jobs import Script, local_constructors


def test_objects_that_read_the_configuration_get_the_settings_of_their_role() -> None:
    settings = ["dense.device=cpu"]
    completed = {each.func: each.keywords for each in local_constructors(settings)}
    assert completed == {each: {"settings": settings} for each in (Script, Trainer)}

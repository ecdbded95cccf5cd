"""What errors say, and that they travel."""

import pickle

from hybrid.errors import ClusterError, ConfigError, HybridError


class TestErrors:
    def test_a_config_error_survives_the_way_between_processes(self) -> None:
        error = pickle.loads(pickle.dumps(ConfigError("train.batch_size", "must be at least 1", 0)))
        assert type(error) is ConfigError
        assert (error.key, error.rule, error.value) == ("train.batch_size", "must be at least 1", 0)
        assert str(error) == "train.batch_size = 0: must be at least 1"

    def test_every_error_is_the_users_to_mend(self) -> None:
        assert issubclass(ConfigError, HybridError)
        assert issubclass(ClusterError, HybridError)
        assert str(ConfigError("data.path", "must not be empty")) == "data.path: must not be empty"

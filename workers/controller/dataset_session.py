"""A job on a cluster that trains and evaluates on a prepared data set."""

import math
from collections.abc import Iterator
from pathlib import Path

from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.config import RunConfig
from hybrid.data.dataset import dataset_manifest
from hybrid.data.dataset.dataset_manifest import DataManifest
from hybrid.data.dataset.group_order import check_ranking_losses
from hybrid.data.prepare.dataset_location import open_split
from hybrid.errors import ConfigError
from hybrid.metrics import Metrics, Predictions, check_custom_metrics
from hybrid.topology import Topology
from workers.controller.remote_trainer import Trainer, TrainerReport
from workers.controller.session import Session

_EVAL_STEPS_PER_CALL = 20


class DatasetSession(Session):
    """A session that trains and evaluates on a prepared data set.

    Attributes:
        steps_per_epoch: number of steps of a pass over all training samples.
        reports: of the training and the test samples.
        has_test_rows: whether there are test samples.
        best_auc: AUC of the first task that no model can exceed on the test samples; None if it is unknown or
            metrics are weighted.
        limit: the key that ends the run, ``train.epochs`` or ``train.max_steps``.
        total_steps: of the run.
    """

    def __init__(self, topology: Topology, config: RunConfig, data_folder: Path) -> None:
        check_custom_metrics(config.all_tasks)
        self._prepared = data_folder
        train = open_split(data_folder, "train", config.data)
        test = open_split(data_folder, "test", config.data)
        if not test.num_samples and config.data.test_fraction:
            rule = "leaves no test rows; raise it, set it to 0 to train without, or set data.test_path"
            raise ConfigError("data.test_fraction", rule, config.data.test_fraction)
        check_ranking_losses(config.all_tasks, train, config.train.batch_size)
        self.best_auc = None if config.data.weighted_metrics else test.report.labels[0].best_auc
        self.reports = (train.report, test.report)
        self.steps_per_epoch = math.ceil(train.num_samples / config.train.batch_size)
        self._test_steps = math.ceil(test.num_samples / config.train.batch_size)
        self.has_test_rows = test.num_samples > 0
        ends = {"train.epochs": self.steps_per_epoch * config.train.epochs}
        if config.train.max_steps:
            ends["train.max_steps"] = config.train.max_steps
        self.limit = min(ends, key=lambda key: ends[key])
        self.total_steps = ends[self.limit]
        super().__init__(
            topology,
            config,
            train.input_spec,
            self.total_steps,
            ids_per_sample=train.ids_per_sample,
            data_folder=data_folder,
        )

    def train(self, epoch: int, first_step: int, num_steps: int, steps_before: int) -> list[TrainerReport]:
        """Take some steps of an epoch on all trainers; see :meth:`Trainer.train`."""
        timeout = self._timeout_seconds(num_steps)
        return self._on_trainers(timeout, Trainer.train, epoch, first_step, num_steps, steps_before)

    def evaluate(self, steps_before: int) -> Metrics:
        """Return metrics over the whole test set, with the model after ``steps_before`` steps."""
        parts = [each for predictions in self.evaluation(steps_before) for each in predictions]
        is_weighted = self.config.data.weighted_metrics
        return Predictions.concatenate(parts).metrics(self.config.all_tasks, is_weighted=is_weighted)

    def evaluation(self, steps_before: int) -> Iterator[list[Predictions]]:
        """Yield the predictions of all trainers for the test set, some steps at a time."""
        for first in range(0, self._test_steps, _EVAL_STEPS_PER_CALL):
            count = min(_EVAL_STEPS_PER_CALL, self._test_steps - first)
            timeout = self._timeout_seconds(count)
            yield self._on_trainers(timeout, Trainer.evaluate, first, count, steps_before)

    def load(self, stored: Checkpoint) -> None:
        """Load a checkpoint.

        Raises:
            CheckpointError: it is of another model.
            DataError: it was trained on other samples; names the changed file.
        """
        rule = "continue with that version, or start a new run"
        trained_on = DataManifest.read(stored.parts / dataset_manifest.COPY_NAME, rule)
        now = DataManifest.read(self._prepared / dataset_manifest.FILE_NAME)
        trained_on.check_same(now, "resume with the same files, or start a new run")
        super().load(stored)

    def _texts(self) -> dict[str, str]:
        data = (self._prepared / dataset_manifest.FILE_NAME).read_text(encoding="utf-8")
        return {**super()._texts(), dataset_manifest.COPY_NAME: data}

    def _timeout_seconds(self, num_steps: int) -> float:
        cluster = self.config.cluster
        return cluster.timeout_seconds + num_steps * cluster.timeout_seconds

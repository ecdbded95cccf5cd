"""What a checkpoint of a configured run holds, for whoever uses the model without a cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from hybrid.checkpoint.checkpoint_files import DENSE_FILE, REMOTE_FILE
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.dense_state import load_state, unpack_dense
from hybrid.config import ColumnSection, RunConfig
from hybrid.config.loading import CONFIG_FILE
from hybrid.config.sections import NETS
from hybrid.data.encode.feature_encoder import FILE_NAME, FeatureEncoder
from hybrid.dense.net_builder import extra_columns
from hybrid.engine.model_builder import Blueprint
from hybrid.engine.table_setup import table_specs
from hybrid.errors import CheckpointError
from hybrid.models.dense_net import DenseNet
from hybrid.storage import files as storage
from hybrid.storage.remote_path import StoragePath
from hybrid.user_code.run_signature import load_run_config


@dataclass(frozen=True, eq=False)
class Trained:
    """A model in a checkpoint; the rows of its tables stay in their files.

    Attributes:
        stored: the checkpoint.
        config: of its run.
        encoder: makes numbers of raw values, as it did in training.
    """

    stored: Checkpoint
    config: RunConfig
    encoder: FeatureEncoder

    @classmethod
    def read(
        cls,
        folder: StoragePath,
        say: Callable[[str], object],
        trust_code: bool = False,
        *,
        uses_paths: bool = False,
    ) -> Trained:
        """The model of a run's best checkpoint, or of one that is named.

        Args:
            folder: of the run, or of one of its checkpoints.
            say: told, in one line, of checkpoints that are damaged.
            trust_code: whether code that it names may be run though the user has not signed it.
            uses_paths: whether its data will be read, too; see :func:`load_run_config`.

        Raises:
            CheckpointError: there is no checkpoint, it is broken, or of a loop of the user's own.
            ConfigError: it names code that may not be run, or paths that may not be used.
        """
        stored = Checkpoint.best_valid(folder, say)
        if not storage.exists(stored.parts / FILE_NAME):
            rule = "its module is known to your code alone: hybrid.load(FOLDER, MODULE) takes both"
            raise CheckpointError(f"{stored.folder}: was saved by a loop of your own; {rule}")
        config = load_run_config(stored.parts / CONFIG_FILE, trust_code=trust_code, uses_paths=uses_paths)
        encoder = FeatureEncoder.load(stored.parts)
        return cls(stored, _with_weights(config, encoder), encoder)

    @property
    def origin(self) -> str:
        """The checkpoint, and what it is among those of its run, in words."""
        stored = self.stored
        return f"{stored.folder}, {stored.standing}" if stored.standing else str(stored.folder)

    @cached_property
    def blueprint(self) -> Blueprint:
        """What nets are built by, and the tables, each of them whole."""
        spec = self.encoder.input_spec
        tables = table_specs(self.config, spec, extra_columns(self.config.dense.net_call.name))
        whole = tuple(dataclasses.replace(each, placement="table", workers=()) for each in tables)
        return Blueprint(self.config, spec, whole)

    def nets(self) -> tuple[DenseNet, nn.Sequential | None]:
        """The dense net, and the remote one where there is one, as they were trained, to predict."""
        files = {DENSE_FILE: self._net_state(DENSE_FILE)}
        if self.config.dense.remote_mlp:
            files[REMOTE_FILE] = self._net_state(REMOTE_FILE)
        if self.config.dense.net_call.name in NETS:
            self._check_shapes(files)
        net, remote_net = self.blueprint.dense_net(), self.blueprint.remote_net()
        for module, state in zip((net, remote_net), files.values(), strict=False):
            assert module is not None
            load_state(module, state, self.stored.folder)
            module.eval()
        return net, remote_net

    def _net_state(self, file: str) -> dict[str, Tensor]:
        return unpack_dense(self.stored.tensors(file))[0]

    def _check_shapes(self, files: dict[str, dict[str, Tensor]]) -> None:
        """Compare the shapes of built-in nets with their files, before memory is allocated for the nets.

        Raises:
            CheckpointError: the configuration describes other nets, which may be of any size.
        """
        arguments = self.config.dense.net_call.arguments
        layers = max(arguments.get("cross_layers", 0), arguments.get("experts", 0))
        num_bytes = sum(size for size, _ in self.stored.manifest.files.values())
        expected: list[dict[str, torch.Size]] = []
        if layers <= len(files[DENSE_FILE]) and sum(self.blueprint.widths) <= num_bytes:
            with suppress(RuntimeError), torch.device("meta"):  # raised for sizes beyond any tensor's
                nets = (self.blueprint.dense_net(), self.blueprint.remote_net())
                expected = [
                    {k: t.shape for k, t in net.state_dict().items()} for net in nets if net is not None
                ]
        if expected != [{name: tensor.shape for name, tensor in state.items()} for state in files.values()]:
            rule = "is of another model: its configuration describes nets of other shapes than its files hold"
            raise CheckpointError(f"{self.stored.folder}: {rule}")


def _with_weights(config: RunConfig, encoder: FeatureEncoder) -> RunConfig:
    """``config``, with a column of weighted ids for each feature that had such in the user's own batches."""
    weighted = {
        each.name: dataclasses.replace(config.columns.get(each.name, ColumnSection()), kind="weighted")
        for each in encoder.sparse
        if each.weighted
    }
    return config.replace(columns={**config.columns, **weighted}) if weighted else config

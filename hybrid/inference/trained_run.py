"""A trained model, read from a checkpoint without a cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from hybrid.checkpoint.checkpoint_folders import CUSTOM_LOOP, DENSE_FILE, REMOTE_FILE
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import load_state, unpack_dense
from hybrid.config import RunConfig
from hybrid.config.loading import CONFIG_FILE
from hybrid.config.sections import NETS
from hybrid.data.encode.feature_encoder import FILE_NAME, FeatureEncoder
from hybrid.engine.model_builder import Blueprint, table_specs
from hybrid.errors import CheckpointError
from hybrid.models.dense_net import DenseNet
from hybrid.storage import files as storage
from hybrid.storage.remote_path import StoragePath
from hybrid.user_code.run_signature import load_run_config


@dataclass(frozen=True, eq=False)
class TrainedRun:
    """A model in a checkpoint; the rows of its tables stay in their files."""

    stored: Checkpoint
    config: RunConfig
    encoder: FeatureEncoder

    @classmethod
    def read(
        cls,
        folder: StoragePath,
        warn: Callable[[str], object],
        trust_code: bool = False,
        *,
        uses_data: bool = False,
    ) -> TrainedRun:
        """Read the best checkpoint of a run, or a checkpoint or export.

        Args:
            folder: the folder of the run, checkpoint or export.
            warn: receives a message if damaged checkpoints are skipped.
            trust_code: whether the user trusts the code and data paths of the run without a signature.
            uses_data: whether the caller will read the run's data; if so, their paths need a signature.

        Raises:
            CheckpointError, DataError: there is no checkpoint, or it is damaged, or has no valid encoder.
            ConfigError: the user has not signed the code or the data of the run, or a key is invalid.
        """
        stored = Checkpoint.best_valid(folder, warn)
        files_folder = stored.files_folder
        if not storage.exists(files_folder / FILE_NAME):
            rule = "was saved by a script without cluster.prepare(); use hybrid.load(FOLDER, MODULE)"
            raise CheckpointError(f"{stored.folder} {rule}")
        config = load_run_config(
            files_folder / CONFIG_FILE, trust_code=trust_code, uses=["data"] if uses_data else ()
        )
        encoder = FeatureEncoder.load(files_folder)
        return cls(stored, config, encoder)

    @property
    def origin(self) -> str:
        """The folder of the checkpoint as text; for a run, also whether it is the best or last checkpoint."""
        stored = self.stored
        return f"{stored.folder}, {stored.rank_text}" if stored.rank_text else str(stored.folder)

    @cached_property
    def blueprint(self) -> Blueprint:
        """The specification of nets and tables; each table has one shard."""
        spec = self.encoder.input_spec
        tables = table_specs(self.config, spec)
        unsharded = tuple(dataclasses.replace(each, placement="table", workers=()) for each in tables)
        return Blueprint(self.config, spec, unsharded)

    def nets(self) -> tuple[DenseNet, nn.Sequential | None]:
        """Build the dense net, and the remote net if there is one, with trained parameters.

        Raises:
            CheckpointError: a custom loop wrote the checkpoint, or its files are damaged or of other nets.
            ConfigError: a custom net cannot be built.
        """
        if CUSTOM_LOOP in self.stored.manifest.progress:
            rule = "add --module FILE.py:FUNCTION, which makes its module, or use hybrid.load(FOLDER, MODULE)"
            raise CheckpointError(f"{self.stored.folder} was saved by a custom training loop; {rule}")
        names = [DENSE_FILE, REMOTE_FILE] if self.config.dense.remote_mlp else [DENSE_FILE]
        files = {name: unpack_dense(self.stored.tensors(name))[0] for name in names}
        if self.config.dense.net_call.name in NETS:
            self._check_shapes(files)
        net, remote_net = self.blueprint.dense_net(), self.blueprint.remote_net()
        for module, state in zip((net, remote_net), files.values(), strict=False):
            assert module is not None
            load_state(module, state, self.stored.folder)
            module.eval()
        return net, remote_net

    def _check_shapes(self, files: dict[str, dict[str, Tensor]]) -> None:
        """Raise CheckpointError if the configured built-in nets have other shapes than ``files``."""
        arguments = self.config.dense.net_call.arguments
        layers = max(arguments.get(name, 0) for name in ("cross_layers", "experts", "blocks"))
        num_bytes = sum(size for size, _ in self.stored.manifest.files.values())
        expected: list[dict[str, torch.Size]] = []
        if layers <= len(files[DENSE_FILE]) and sum(self.blueprint.widths) <= num_bytes:
            with suppress(RuntimeError), torch.device("meta"):  # the error of impossibly large sizes
                nets = (self.blueprint.dense_net(), self.blueprint.remote_net())
                expected = [
                    {k: t.shape for k, t in net.state_dict().items()} for net in nets if net is not None
                ]
        if expected != [{name: tensor.shape for name, tensor in state.items()} for state in files.values()]:
            rule = "is of another model: its configuration describes nets of other shapes than its files hold"
            raise CheckpointError(f"{self.stored.folder}: {rule}")

"""The model of a run that is still training, updated by the run's deltas."""

import logging
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from hybrid.checkpoint.checkpoint_folders import DENSE_FILE, REMOTE_FILE, step_folder
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.deltas import Changes, DeltaChain, identity_of, open_delta, read_changes
from hybrid.checkpoint.tensor_file import load_state, unpack_dense
from hybrid.data.encode.feature_encoder import FILE_NAME, FeatureEncoder
from hybrid.errors import CheckpointError, StorageError
from hybrid.inference.table_modules import GrowingTable, MappedTable
from hybrid.inference.trained_module import ConfiguredModule
from hybrid.inference.trained_run import TrainedRun
from hybrid.storage.remote_path import StoragePath, parse_path

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.2


def follow(run: str | StoragePath, *, trust_code: bool = False) -> Iterator[ConfiguredModule]:
    """Yield the model of a run as it trains, until the run ends.

    The run needs ``checkpoint.deltas``. The first module is read from a checkpoint. Each further iteration
    waits for deltas, applies all new deltas to this module, and yields the module again. If the run was
    resumed, or has removed a delta that the module needs, a new module is read from a checkpoint. The
    attributes ``step`` and ``taken_at`` belong to the current parameters.

    Args:
        run: a run folder or its URL; the run may start later.
        trust_code: whether user code of the run may be executed if you have not signed it.

    Raises:
        CheckpointError, DataError: a checkpoint or delta is damaged, or of another version.
        ConfigError: the run names code that may not be executed, or that fails.
        StorageError: the store refuses a request.
    """
    for model, _ in follow_changes(parse_path(run), trust_code=trust_code):
        yield model


def follow_changes(
    root: StoragePath, *, trust_code: bool = False, in_memory: bool = True
) -> Iterator[tuple[ConfiguredModule, Changes]]:
    """Yield the modules of :func:`follow`, each with the changes of the tables since the last iteration.

    With a module that was just read from a checkpoint, yield the changes since this checkpoint.

    Args:
        in_memory: whether tables are in memory and get the changes; otherwise they stay as in the checkpoint.
    """
    model: ConfiguredModule | None = None
    identity = ""  # of the version that the module has
    while True:
        chain = DeltaChain.read(root)
        if chain is None or (model is not None and identity == chain.last.identity):
            if chain is not None and chain.has_ended:
                return
            time.sleep(_POLL_SECONDS)
            continue
        try:
            if model is None or chain.after(identity) is None:
                folder = step_folder(root, chain.base.step)
                trained = TrainedRun.read(folder, warnings.warn, trust_code)
                if identity_of(trained.stored.manifest) != chain.base_checkpoint:
                    raise CheckpointError(f"{folder}: is not the checkpoint that the deltas start from")
                model = ConfiguredModule(trained, in_memory=in_memory)
                model.taken_at, identity = chain.base.taken_at, chain.base.identity
                changes: Changes = {name: [] for name in model.table_names}
            for version in chain.after(identity) or ():
                _apply(open_delta(root, version), model, changes)
                model.step, model.taken_at, identity = version.step, version.taken_at, version.identity
        except (CheckpointError, StorageError):
            if DeltaChain.read(root) == chain:
                raise
            continue  # the chain has changed, so the run may have removed these files
        _LOG.info("step %d: read %.3f s after its end", model.step, time.time() - model.taken_at)
        yield model, changes
        changes = {name: [] for name in model.table_names}


@torch.no_grad()
def _apply(delta: Checkpoint, model: ConfiguredModule, changes: Changes) -> None:
    """Apply a delta to the nets, the encoder and the tables in memory, and add its rows to ``changes``.

    Raise CheckpointError if the delta is damaged; the nets, but not the tables, may then be changed.
    """
    of_tables = [
        read_changes(delta, table.name, None if table.growth else table.num_rows, table.dim)
        for table in model.table_specs
    ]
    nets = (DENSE_FILE, model.net), (REMOTE_FILE, model.remote_net)
    states = [(net, unpack_dense(delta.tensors(name))[0]) for name, net in nets if net is not None]
    for net, state in states:
        load_state(net, state, delta.folder)
    for name, table, of_table in zip(model.table_names, model.tables, of_tables, strict=True):
        changes[name] += of_table
        if isinstance(table, MappedTable):
            continue
        arrays = map(np.concatenate, zip(*of_table, strict=True))
        rows_U, weight_UD, evicted_E = map(torch.from_numpy, arrays)
        if isinstance(table, GrowingTable):
            table.update(rows_U, weight_UD, evicted_E)
        else:
            assert isinstance(table, torch.nn.Embedding)
            table.weight[rows_U] = weight_UD.to(table.weight.dtype)
    if FILE_NAME in delta.manifest.files:
        dense = FeatureEncoder.load(delta.files_folder, with_values=False).dense
        model.trained = replace(model.trained, encoder=replace(model.trained.encoder, dense=dense))

"""The checkpoints of a custom training loop, which a script saves, loads and resumes."""

from collections.abc import Sequence

import torch

from hybrid.checkpoint import checkpoint_folders
from hybrid.checkpoint.checkpoint_folders import BEST, CUSTOM_LOOP, MANIFEST_FILE, Best, Manifest
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.custom_loop.backend import Backend
from hybrid.custom_loop.loop_state import LoopProgress, Stateful, describe_start, load_progress, pack_state
from hybrid.custom_loop.training_loop import TrainingLoop
from hybrid.errors import CheckpointError, StorageError
from hybrid.metrics import Metrics
from hybrid.storage import files as storage
from hybrid.storage.remote_path import StoragePath


class LoopCheckpoints:
    """The checkpoints of a custom loop. All trainers call the methods together.

    Attributes:
        root: the run folder of :meth:`resume`; None before it is called.
    """

    def __init__(self, backend: Backend, loop: TrainingLoop) -> None:
        self._backend = backend
        self._loop = loop
        self.root: StoragePath | None = None
        self._objects: Sequence[Stateful] = ()
        self._every_steps = 0
        self._saved_step = 0  # of the newest checkpoint; 0 if there is none
        # The best evaluation, and the best one of which there is a checkpoint.
        self._best: Best | None = None
        self._saved_best: Best | None = None

    def save(self, folder: StoragePath, objects: Sequence[Stateful], best: Best | None = None) -> None:
        """Write a checkpoint with the best evaluation so far; see :meth:`Cluster.save`."""
        loop, manifest_path = self._loop, folder / MANIFEST_FILE
        loop.flush()
        is_resumed = loop.history.before != LoopProgress()
        if is_resumed and storage.exists(manifest_path) and Manifest.read(manifest_path).step == loop.step:
            return  # a role was lost after this save, and the script repeats it
        loop.is_saving = True
        try:
            dense, progress = pack_state(loop.model.net, objects, loop.history.now)
        finally:
            loop.is_saving = False
        progress |= {CUSTOM_LOOP: True, BEST: best}
        manifest = Manifest(loop.step, 0, loop.placed.placement.shapes, progress=progress)
        self._backend.save(loop.placed.number, folder, manifest, dense)

    def load(self, stored: Checkpoint, objects: Sequence[Stateful]) -> LoopProgress:
        """Load a checkpoint, and return its progress; see :meth:`Cluster.load`."""
        loop = self._loop
        tables, shapes = stored.manifest.tables, loop.placed.placement.shapes
        if tables.keys() != shapes.keys():
            raise CheckpointError(
                f"{stored.folder}: the checkpoint is of another model, with the tables "
                f"{', '.join(sorted(tables))}, not {', '.join(sorted(shapes))}"
            )
        loop.flush()
        progress = load_progress(loop.model.net, objects, stored)
        self._backend.load(loop.placed.number, stored)
        loop.continue_from(stored.manifest.step)
        return progress

    def resume(self, root: StoragePath, objects: Sequence[Stateful], every_steps: int) -> StoragePath | None:
        """Load the newest valid checkpoint of a run folder; others will follow. See :meth:`Cluster.resume`.

        Returns:
            The folder of the checkpoint; None if there is none.
        """
        self.root, self._objects, self._every_steps = root, objects, every_steps
        history = self._loop.history
        history.is_recorded = True
        history.now.start = describe_start(self._loop.model.net, objects, self._backend.group.size())
        step = -1
        if self._backend.trainer == 0 and checkpoint_folders.list_checkpoints(root):
            step = Checkpoint.newest_valid(root, self._backend.warn).manifest.step
            checkpoint_folders.remove_after(root, step)
        step = int(self._loop.trainers.gather(torch.tensor([step]))[0])
        if step < 0:
            return None
        stored = Checkpoint.open(checkpoint_folders.step_folder(root, step))
        self._saved_step = step
        self._best = self._saved_best = stored.manifest.best
        history.resume(self.load(stored, objects), str(stored.folder))
        return stored.folder

    def record_evaluation(self, metrics: Metrics) -> None:
        """Record an evaluation; if it is the best one, a checkpoint follows before the next step."""
        if self.root is not None:
            by = self._backend.config.best_by
            self._best = checkpoint_folders.choose_best(self._best, by, metrics, self._loop.step)

    def write_if_due(self, *, is_last: bool = False) -> None:
        """Write a checkpoint between two steps, if it is due; remove old ones.

        If that fails, there is a warning, and the script continues. Only the last checkpoint must succeed.

        Raises:
            CheckpointError: the last checkpoint cannot be written.
        """
        step = self._loop.step
        if self.root is None or step == self._saved_step:
            return
        is_best = self._best is not None and self._best.step == step
        if not (is_last or is_best or step % self._every_steps == 0):
            return
        try:
            self.save(checkpoint_folders.step_folder(self.root, step), self._objects, self._best)
        except CheckpointError as error:  # of all trainers
            failure = f"no checkpoint of step {step}: {error}"
            if is_last:
                raise CheckpointError(
                    f"{failure}; a new start resumes from step {self._saved_step}"
                ) from error
            if self._backend.trainer == 0:
                self._backend.warn(f"{failure}; training continues")
            self._best = self._saved_best
            return
        self._saved_step, self._saved_best = step, self._best
        if self._backend.trainer == 0:
            keep_last = self._backend.config.checkpoint.keep_last
            try:
                checkpoint_folders.prune(self.root, keep_last, self._best and self._best.step)
            except (CheckpointError, StorageError) as error:
                self._backend.warn(f"an old checkpoint could not be removed: {error}")

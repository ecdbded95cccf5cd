"""Reading checkpoints, and the newest and the best valid one of a run."""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import torch
from support.checkpoints import flip_a_bit, write_run
from torch import Tensor

from hybrid.checkpoint.checkpoint_folders import (
    DENSE_FILE,
    MANIFEST_FILE,
    Best,
    Manifest,
    shard_file,
    step_folder,
)
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.checkpoint.tensor_file import write_tensors
from hybrid.errors import CheckpointError


@pytest.mark.parametrize("num_rows", [1, 4, 13])
@pytest.mark.parametrize("then", range(1, 7))
def test_rows_of_any_number_of_shards_load_into_any_other_number(
    tmp_path: Path, num_rows: int, then: int
) -> None:
    values_RD = torch.arange(2.0 * num_rows).view(num_rows, 2)
    for shard in range(then):
        tensors = {"weight": values_RD[shard::then], "sum": -values_RD[shard::then, 0]}
        write_tensors(tmp_path, shard_file("t", shard, then), tensors)
    stored = Checkpoint(tmp_path, Manifest(1, 1, {"t": (num_rows, 2, then)}, {}, {}, {}))
    for now in range(1, 7):
        for index in range(now):
            values = values_RD[index::now]
            into = {
                "weight": torch.full_like(values, torch.nan),
                "sum": torch.full((len(values),), torch.nan),
            }
            stored.load_rows("t", index, now, into)
            assert torch.equal(into["weight"], values)
            assert torch.equal(into["sum"], -values[:, 0])
    into = {"weight": torch.zeros(num_rows + 1, 2), "sum": torch.zeros(num_rows + 1)}
    with pytest.raises(CheckpointError, match="table t"):
        stored.load_rows("t", 0, 1, into)


@pytest.mark.parametrize("tensors", [{}, {"rows": torch.zeros(3, 2)}, {"weight": torch.tensor(1.0)}])
def test_a_file_without_rows_is_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    write_tensors(tmp_path, shard_file("t", 0, 1), tensors)
    stored = Checkpoint(tmp_path, Manifest(1, 1, {"t": (3, 2, 1)}, {}, {}, {}))
    into = {name: torch.zeros(3) for name in tensors}
    for read in (lambda: stored.map_rows("t", 3, 2), lambda: stored.load_rows("t", 0, 1, into)):
        with pytest.raises(CheckpointError, match=f"^{tmp_path}/tables/t.0-of-1.safetensors: "):
            read()


def test_shards_of_other_sizes_are_refused(tmp_path: Path) -> None:
    for shard, num_rows in enumerate((1, 4)):  # not 3 and 2
        write_tensors(tmp_path, shard_file("t", shard, 2), {"weight": torch.zeros(num_rows, 2)})
    stored = Checkpoint(tmp_path, Manifest(1, 1, {"t": (5, 2, 2)}, {}, {}, {}))
    with pytest.raises(CheckpointError, match="table t"):
        stored.map_rows("t", 5, 2)


class TestNewestValid:
    @pytest.mark.parametrize(
        ("altered", "step"),
        [([], 110), ([(110, MANIFEST_FILE)], 30), ([(110, DENSE_FILE), (30, DENSE_FILE)], 2)],
    )
    def test_damaged_checkpoints_are_skipped_and_reported(
        self, tmp_path: Path, altered: list[tuple[int, str]], step: int
    ) -> None:
        logged: list[str] = []
        write_run(tmp_path, 2, 30, 110)
        paths = [step_folder(tmp_path, of_step) / name for of_step, name in altered]
        for path in paths:
            flip_a_bit(path)
        assert Checkpoint.newest_valid(tmp_path, logged.append).manifest.step == step
        assert len(logged) == bool(paths)
        for line in logged:
            damage = "; ".join(f"{path}: [^;]+" for path in paths)
            assert re.fullmatch(f"{damage}; step-{step:08d} is used instead", line)


class TestBestValid:
    """Of a run with checkpoints after steps 2, 30 and 110, of which 30 is the best."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        write_run(tmp_path, 2, 30, 110)
        self.rank(tmp_path, 30)
        return tmp_path

    def rank(self, run: Path, best: int | None, newest: int = 110) -> None:
        """Record the best checkpoint in the newest."""
        folder = step_folder(run, newest)
        progress = {"best": None if best is None else Best("auc", 0.75, best)}
        read = Manifest.read(folder / MANIFEST_FILE)
        dataclasses.replace(read, progress=progress).write(folder)

    @pytest.mark.parametrize(
        ("best", "step", "rank_text"),
        [
            (30, 30, "the best (auc 0.7500); the last is step-00000110"),
            (110, 110, "the best (auc 0.7500) and the last"),
            (None, 110, "the last"),
        ],
    )
    def test_the_best_checkpoint_is_opened_or_else_the_last(
        self, run: Path, best: int | None, step: int, rank_text: str
    ) -> None:
        self.rank(run, best)
        found = Checkpoint.best_valid(run, pytest.fail)
        assert (found.manifest.step, found.folder) == (step, step_folder(run, step))
        assert found.rank_text == rank_text
        named = Checkpoint.best_valid(step_folder(run, 2), pytest.fail)
        assert (named.manifest.step, named.rank_text) == (2, "")

    @pytest.mark.parametrize("is_there", [True, False])
    def test_the_newest_replaces_a_damaged_or_missing_best(self, run: Path, is_there: bool) -> None:
        logged: list[str] = []
        best = step_folder(run, 30)
        if is_there:
            flip_a_bit(best / DENSE_FILE)
        else:
            shutil.rmtree(best)
        found = Checkpoint.best_valid(run, logged.append)
        assert (found.manifest.step, found.rank_text) == (110, "the last")
        (line,) = logged
        assert line.startswith(f"{best / DENSE_FILE if is_there else best}: ")
        assert "step-00000110" in line

    def test_an_older_manifest_names_the_best_if_the_newest_is_damaged(self, run: Path) -> None:
        self.rank(run, 2, newest=30)
        flip_a_bit(step_folder(run, 110) / MANIFEST_FILE)
        found = Checkpoint.best_valid(run, pytest.fail)
        assert found.manifest.step == 2
        assert found.rank_text == "the best (auc 0.7500); the last is step-00000110"

    def test_a_run_without_valid_checkpoints_is_an_error(self, run: Path) -> None:
        for step in (2, 30, 110):
            flip_a_bit(step_folder(run, step) / MANIFEST_FILE)
        with pytest.raises(CheckpointError, match=r"step-00000110/manifest.*; .*step-00000002/manifest"):
            Checkpoint.best_valid(run, pytest.fail)
        with pytest.raises(CheckpointError, match=f"^{run / 'absent'}: "):
            Checkpoint.best_valid(run / "absent", pytest.fail)

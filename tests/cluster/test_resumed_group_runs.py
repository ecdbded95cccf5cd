"""Resumed runs whose trainers sum gradients by the process group, as they do on several hosts."""

from pathlib import Path

import pytest
from support.cluster import Clusters, small_config
from support.stopped_runs import checksums, train

from hybrid.checkpoint.checkpoint_folders import step_folder

TOTAL = 13


@pytest.mark.parametrize(
    ("trainers", "update"), [(3, "sync"), (4, "pipelined"), (3, "pipelined"), (4, "sync")]
)
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(
    trainers: int, update: str, clusters: Clusters, cache: Path, tmp_path: Path
) -> None:
    """Sums must not depend on the layout of DDP's buckets, which changes after the first step."""
    config = small_config(
        cluster={"trainers": trainers},
        train={"update": update, "max_steps": TOTAL, "batch_size": 128, "log_every_steps": 1},
        checkpoint={"every_steps": 1, "keep_last": 99, "keep_best": "none"},
        dense={"optimizer": "Adam", "learning_rate": 0.01},
    )
    cluster = clusters.get(trainers, 2, has_many_hosts=True)
    cluster.run(train, config, cache, tmp_path / "whole")
    for cut in (5, 11):
        run = tmp_path / str(cut)
        cluster.run(train, config, cache, run, last_step=cut + 1, saved_step=cut)
        notes = cluster.run(train, config, cache, run, resume=True)
        assert "from step" in notes[0]
        for step in range(cut, TOTAL + 1):
            assert checksums(step_folder(run, step)) == checksums(step_folder(tmp_path / "whole", step)), step

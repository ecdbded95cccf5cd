"""A cluster in ``sync`` mode against one process of plain torch with the whole batch."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from support.cluster import Clusters, small_config
from support.jobs import train
from support.reference import Reference

from hybrid.data.prepared import prepare

STEPS = 24  # a whole epoch of 3000 rows; its last batch has 56
close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("trainers", "workers", "placement", "optimizer"),
    [
        (1, 1, "table", "sgd"),
        (1, 2, "row", "adagrad"),
        (2, 2, "table", "adagrad"),
        (2, 2, "row", "sgd"),
        (3, 3, "row", "adagrad"),
    ],
)
def test_it_equals_one_process(
    trainers: int,
    workers: int,
    placement: str,
    optimizer: str,
    clusters: Clusters,
    cache: Path,
    tmp_path: Path,
) -> None:
    # Adagrad's first step is the gradient's sign: a small eps would blow rounding up to whole steps.
    rows = {"placement": placement, "optimizer": optimizer, "eps": 1e-2}
    config = small_config(cluster={"trainers": trainers, "workers": workers}, embedding=rows)
    trained = clusters.get(trainers, workers).run(train, config, cache, tmp_path, STEPS)
    reference = Reference(config, prepare(config, cache), trained.initial_tables)
    close(trained.losses, reference.train(STEPS))
    assert trained.losses[-1] < trained.losses[0]
    for name, rows_RD in reference.tables.items():
        close(trained.tables[name], rows_RD.detach())
        assert not torch.equal(trained.initial_tables[name], trained.tables[name])
    for net in trained.nets:
        for name, parameter in reference.net.state_dict().items():
            close(net[name], parameter)

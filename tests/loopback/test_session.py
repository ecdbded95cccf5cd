"""A session whose roles are all this process: what the master sees of work that is still on its way."""

import functools
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark.batch_session import BatchSession
from support.cluster import LocalTopology, small_config
from torch import Tensor
from torch.futures import Future
from torch.testing import assert_close

from hybrid.batch import Batch, SparseFeatures
from hybrid.checkpoint.checkpoint_folders import Manifest, shard_file
from hybrid.checkpoint.checkpoint_reader import Checkpoint
from hybrid.embedding.worker.table_shards import TableShards
from hybrid.input_spec import FeatureSpec, InputSpec
from hybrid.transport import Remote
from hybrid.updates.ticket import Ticket
from workers.cluster_task import ScriptTask
from workers.console import TerminalView
from workers.controller.script_job import ScriptJob
from workers.exit_codes import ExitCode

pytestmark = pytest.mark.usefixtures("loopback")

STEPS, SIZE, ROWS = 4, 5, 6
INPUT = InputSpec(("x",), (FeatureSpec("ids", ROWS),))
DELAY_SECONDS = 0.2


def make_batches(trainer: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(trainer)
    return [
        Batch(
            torch.randn(SIZE, 1, generator=generator),
            SparseFeatures(torch.randint(0, ROWS, (SIZE,), generator=generator), None, None, 1),
            torch.randint(0, 2, (SIZE,), generator=generator).float(),
            SIZE,
        )
        for _ in range(STEPS)
    ]


def two_batches(trainer: int) -> list[Batch]:
    """Return batches whose lookups precede all updates, so that rows in async do not depend on timing."""
    return make_batches(trainer)[:2]


def opened(mode: str, **sections: dict[str, Any]) -> closing[BatchSession]:
    config = small_config(cluster={"trainers": 1, "workers": 1}, train={"update": mode}, **sections)
    return closing(BatchSession(LocalTopology(1, 1), config, INPUT, STEPS))


def test_a_script_may_be_silent_beyond_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, seconds = Remote.call, DELAY_SECONDS

    def call_with_timeout(*args: Any, timeout_seconds: float = seconds) -> Any:
        return call(*args, timeout_seconds=timeout_seconds)

    monkeypatch.setattr(Remote, "call", call_with_timeout)
    for name in ("argv", "path"):  # which a script changes
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    (script := tmp_path / "train.py").write_text(f"import time\ntime.sleep({2 * seconds})")
    job = ScriptJob(small_config(cluster={"timeout_seconds": seconds}), ScriptTask(str(script), ()))
    assert job.run(LocalTopology(1, 1), Path, TerminalView()) == ExitCode.DONE


def delay_last_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    send_gradients = TableShards.send_gradients

    @functools.wraps(send_gradients)  # calls name a method by its own name
    def receive_late(tables: TableShards, ticket: Ticket, *args: Any) -> Future[list[Tensor]]:
        if ticket.step == 1:
            time.sleep(DELAY_SECONDS)
        return send_gradients(tables, ticket, *args)

    monkeypatch.setattr(TableShards, "send_gradients", receive_late)


def saved_rows(mode: str, folder: Path) -> dict[str, Tensor]:
    """Return the rows of a checkpoint that is taken as soon as the trainer has computed both steps."""
    with opened(mode, embedding={"optimizer": "sgd"}) as session:
        session.train_on(two_batches, 0)
        saving = session.begin_save(folder, Manifest(2, 0, {}))
        assert saving.is_copied
        saving.write()
    return Checkpoint.open(folder).tensors(shard_file("ids", 0, 1))


@pytest.mark.parametrize("mode", ["lookahead", "async"])
def test_checkpoints_await_late_gradients(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = saved_rows(mode, tmp_path / "prompt")
    delay_last_gradients(monkeypatch)
    # In async, the order of the two updates depends on timing.
    tolerance = 1e-6 if mode == "async" else 0
    assert_close(saved_rows(mode, tmp_path / "late"), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("mode", ["lookahead", "async"])
def test_a_profile_waits_for_late_updates(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    delay_last_gradients(monkeypatch)
    with opened(mode, profile={"steps": (1, 1)}) as session:
        session.train_on(two_batches, 0)
        profile = session.take_profile()
        spans = [span.name for of_role in profile.spans.values() for span in of_role]
        assert spans.count("apply") == 1

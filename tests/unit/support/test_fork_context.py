"""What is said nowhere where it fails: tests would only take longer."""

import gc
import sys
from multiprocessing.queues import SimpleQueue

from support.fork_context import fork_context

SLOW = {"torch._dynamo", "workers.roles.master", "matplotlib.figure", "tensorboard.summary", "pytest"}


def tell(told: "SimpleQueue[tuple[set[str], int]]") -> None:
    told.put((SLOW - set(sys.modules), gc.get_freeze_count()))


def test_processes_have_what_takes_its_time_and_leave_it_where_it_is() -> None:
    context = fork_context()
    told: SimpleQueue[tuple[set[str], int]] = context.SimpleQueue()
    process = context.Process(target=tell, args=(told,))
    process.start()
    missing, num_frozen = told.get()
    process.join()
    assert not missing
    assert num_frozen > 100_000

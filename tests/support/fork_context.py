"""Processes of tests, forked from one that has imported torch and other slow modules."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

STOP_SECONDS = 20.0
_PRELOAD = ["support.preloaded"]


def fork_context() -> ForkServerContext:
    """Return the context of processes, queues and pipes; start their fork server if it does not run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # It does not report failed imports, and some versions of Python do not pass it the search path.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return context


@contextmanager
def forked_process(target: Callable[..., object], *args: Any, name: str = "") -> Iterator[BaseProcess]:
    """Run ``target(*args)`` in a process; kill it at the end of the block."""
    process = fork_context().Process(target=target, args=args, name=name or None)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(STOP_SECONDS)

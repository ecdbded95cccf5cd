"""Processes of tests, forked from one that has imported torch and other slow modules."""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from unittest import mock

_PRELOAD = ["support.preloaded"]


def fork_context() -> ForkServerContext:
    """Return the context of processes, queues and pipes; start their fork server if it does not run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # It does not report failed imports, and some versions of Python do not pass it the search path.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return context

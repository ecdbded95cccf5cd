"""Processes of tests, forked from one that has imported torch, and all else that takes its time."""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from unittest import mock

_PRELOAD = ["support.preloaded"]


def fork_context() -> ForkServerContext:
    """What makes processes, queues and pipes; the process that is forked is started where it is not there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # It says nothing of what it cannot import, and some versions of Python do not tell it where to look.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return context

"""A group of processes that start and end together."""

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import multiprocessing as torch_multiprocessing

LIMIT_SECONDS = 1200.0
_INTERFACE = "lo"


def run(main: Callable[..., None], count: int, arguments: Sequence[object], preload: Sequence[str]) -> None:
    """Call ``main(rank, meeting_point, *arguments)`` in ``count`` processes, with one intra-op thread each.

    The meeting point is a folder, gone afterwards. The processes are forked from one that has imported the
    modules of ``preload``. They end with this one, also where it is killed.

    Raises:
        ProcessExitedException, ProcessRaisedException: a process failed; the others were ended.
        TimeoutError: the processes took more than LIMIT_SECONDS, and were ended.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # runs the cleanup below
    os.environ.update(TP_SOCKET_IFNAME=_INTERFACE, GLOO_SOCKET_IFNAME=_INTERFACE)
    multiprocessing.set_forkserver_preload(list(preload))
    end = time.monotonic() + LIMIT_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        processes = torch_multiprocessing.start_processes(
            _rank_main, (main, Path(folder), *arguments), count, join=False, start_method="forkserver"
        )
        try:
            while not processes.join(max(0.0, end - time.monotonic()), grace_period=5):
                if time.monotonic() > end:
                    raise TimeoutError(f"the processes are not done after {LIMIT_SECONDS:.0f} seconds")
        finally:
            for process, error_file in zip(processes.processes, processes.error_files, strict=True):
                process.kill()
                process.join()
                Path(error_file).unlink(missing_ok=True)


def _rank_main(rank: int, main: Callable[..., None], meeting_point: Path, *arguments: object) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    main(rank, meeting_point, *arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

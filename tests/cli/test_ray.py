"""configs/cluster/hybrid_ray.py on a Ray cluster of five nodes on this machine."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos_run.run_comparison import differences
from support.commands import JOB, ROOT, Command, eventually, output_of, settings, start_process

from hybrid.checkpoint.checkpoint_folders import list_checkpoints, parse_step

cluster_utils = pytest.importorskip(
    "ray.cluster_utils", reason="needs Ray: pip install 'hybrid-parallel[ray]'"
)
pytestmark = pytest.mark.long
SECONDS = 200.0
RESTARTED = "; restarting"
SIZES = ["--trainer", "CPU=1,GPU=1", "--worker", "CPU=1,memory=1e9"]
WORKER_NODE = {"num_cpus": 1, "memory": 2_000_000_000}


class RayNodes:
    """A head node for the master, two nodes with a pretended GPU, and two nodes with memory."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        head = {"num_cpus": 1, "memory": 10**9, "temp_dir": folder}
        self._cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self.gpu_nodes = [self._cluster.add_node(num_cpus=1, num_gpus=1, memory=10**9) for _ in range(2)]
        self.worker_nodes = [self._cluster.add_node(**WORKER_NODE) for _ in range(2)]
        self.address: str = self._cluster.address

    def lose_worker_node(self) -> None:
        self._cluster.remove_node(self.worker_nodes.pop(), allow_graceful=False)

    def add_worker_node(self) -> None:
        self.worker_nodes.append(self._cluster.add_node(**WORKER_NODE))

    def shutdown(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    # Ray's sockets need a short path. Ray writes the address of the head node into $RAY_TMPDIR/ray.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_TMPDIR", folder)
            (Path(folder) / "ray").mkdir()
            nodes = RayNodes(folder)
        yield nodes
        nodes.shutdown()


class Job:
    """A run of hybrid_ray.py in a folder, and the processes of its roles."""

    def __init__(self, nodes: RayNodes, folder: Path, arguments: list[str]) -> None:
        self.folder = folder
        script = ["env", "--default-signal=INT", sys.executable, str(ROOT / "configs/cluster/hybrid_ray.py")]
        environment = {**os.environ, "RAY_ADDRESS": nodes.address}
        process = start_process([*script, *SIZES, *arguments], environment, folder / "output", folder)
        self.command = Command(process, folder / "output")

    def roles(self, kind: str = "") -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_role = process.cmdline()[1:3] == ["-m", "hybrid"] and kind in process.cmdline()[3]
                if is_role and process.cwd() == str(self.folder):
                    found.append(process)
        return found

    def await_new_checkpoint(self) -> None:
        before = self.newest_step
        assert eventually(lambda: self.newest_step > before, SECONDS), (
            self.command.stdout + self.command.stderr
        )

    def await_restart(self, disturb: Callable[[], object]) -> float:
        """Disturb the run; wait for a restart and a checkpoint; return the seconds until the restart."""
        before, began = self.command.stderr.count(RESTARTED), time.monotonic()
        disturb()
        is_restarted = eventually(lambda: self.command.stderr.count(RESTARTED) > before, SECONDS)
        assert is_restarted, self.command.stderr
        return time.monotonic() - began

    @property
    def newest_step(self) -> int:
        return next(map(parse_step, list_checkpoints(self.folder / "run")), 0)


@contextmanager
def job(nodes: RayNodes, folder: Path, *arguments: str) -> Iterator[Job]:
    running = Job(nodes, folder, list(arguments))
    try:
        yield running
    finally:
        running.command.kill()
        assert eventually(lambda: not running.roles(), SECONDS), "roles are left behind"


def run_settings(epochs: int) -> list[str]:
    train, checkpoint = {"epochs": epochs, "update": "lookahead"}, {"every_steps": 10}
    files = settings(run={"folder": "run"}, data={"cache_folder": "prepared"})
    return [*JOB, *files, *settings(train=train, checkpoint=checkpoint)]


def files_with(text: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_lost_roles_actors_and_nodes_end_with_the_bits_of_launch(nodes: RayNodes, tmp_path: Path) -> None:
    arguments = run_settings(epochs=25)
    with job(nodes, tmp_path, *arguments) as running:
        running.await_new_checkpoint()
        raylets = {each.environ()["RAY_RAYLET_PID"] for each in running.roles("trainer")}
        assert raylets == {str(raylet(node)) for node in nodes.gpu_nodes}
        secret = running.roles("worker")[0].environ()["HYBRID_SECRET"]
        assert not [each for each in psutil.process_iter(["cmdline"]) if secret in str(each.info["cmdline"])]
        assert files_with("waiting for the master", nodes.folder), "Ray has the output of roles"
        assert not files_with(secret, nodes.folder)

        running.await_restart(running.roles("master")[0].kill)
        running.await_new_checkpoint()
        actor = running.roles("trainer")[0].parent()
        assert actor is not None
        running.await_restart(actor.kill)
        running.await_new_checkpoint()
        running.await_restart(nodes.lose_worker_node)
        assert eventually(lambda: "waiting until Ray" in running.command.stderr, SECONDS)
        nodes.add_worker_node()
        ended = running.command.wait(SECONDS)
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count("resuming from step") == ended.stderr.count(RESTARTED) == 3
    output_of(["launch", *arguments, *settings(run={"folder": "uninterrupted"})], tmp_path)
    assert not differences(tmp_path / "uninterrupted", tmp_path / "run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_roles_end_with_the_driver(number: signal.Signals, nodes: RayNodes, tmp_path: Path) -> None:
    """The first two save the run. The next job gets the nodes, so Ray has removed the placement group."""
    with job(nodes, tmp_path, *run_settings(epochs=1_000_000)) as running:
        running.await_new_checkpoint()
        running.command.process.send_signal(number)
        ended = running.command.wait(SECONDS)
        assert ended.code == (-number if number is signal.SIGKILL else 143), ended.stderr
        assert eventually(lambda: not running.roles(), SECONDS)
        assert (f"step {running.newest_step} is saved" in ended.stdout) == (number is not signal.SIGKILL)


def test_error_of_a_script_ends_the_command(nodes: RayNodes, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, hybrid\nhybrid.connect()\nprint('connected')\nsys.exit(f'not {sys.argv[1:]}')\n"
    )
    with job(nodes, tmp_path, "--script", "train.py", "--", "--trainers", "7") as running:
        ended = running.command.wait(SECONDS)
    assert ended.code == 1
    assert "not ['--trainers', '7']" in ended.stdout
    assert "\n(trainer 1) connected\n" in ended.stdout
    assert RESTARTED not in ended.stderr


def test_error_of_the_master_ends_the_command(nodes: RayNodes, tmp_path: Path) -> None:
    """The other roles do not find the master, and end with an exit code that permits a restart."""
    with job(nodes, tmp_path, "--config", "nowhere.toml") as running:
        ended = running.command.wait(SECONDS)
    assert ended.code == 1
    assert RESTARTED not in ended.stderr


def raylet(node: Any) -> int:
    """Return the process id of a node's raylet."""
    pid: int = node.all_processes["raylet"][0].process.pid
    return pid

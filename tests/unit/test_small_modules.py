"""The small modules: who is who, batches, memory, time, folders, sockets, devices and dense optimizers."""

from __future__ import annotations

import errno
import math
import mmap
import pickle
import socket
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hybrid.batch import SparseFeatures
from hybrid.clock import PHASES, StepClock
from hybrid.config import DataSection, DenseSection, RunConfig, RunSection, ScheduleSection
from hybrid.dense.device import choose_backend, choose_devices
from hybrid.dense.optimizer import DenseOptimizer, squared_norm
from hybrid.errors import ClusterError, ConfigError, HybridError
from hybrid.memory import available_memory_bytes, zeros_in_large_pages
from hybrid.steps.rules import Staleness
from hybrid.steps.schedule import Schedule
from hybrid.topology import MASTER, Role, RoleKind, Topology
from workers.joining.listener import listen
from workers.run_folder import paths


class TestTopology:
    @pytest.mark.upstream("dist_autograd/world_size", "dist_autograd/_do_test")
    def test_ranks_are_master_then_trainers_then_workers(self) -> None:
        topology = Topology(num_trainers=2, num_workers=3)
        assert topology.world_size == 6
        assert [str(r) for r in topology.roles] == [
            "master", "trainer 0", "trainer 1", "worker 0", "worker 1", "worker 2",
        ]  # fmt: skip
        assert [topology.rank(r) for r in topology.roles] == list(range(6))
        assert topology.roles == (MASTER, *topology.trainers, *topology.workers)

    @pytest.mark.upstream("dist_autograd/trainer_name", "dist_autograd/remote_worker_name")
    def test_rpc_names_are_distinct(self) -> None:
        roles = Topology(12, 12).roles
        assert len({r.rpc_name for r in roles}) == len(roles)
        assert (MASTER.rpc_name, Role(RoleKind.TRAINER, 1).rpc_name) == ("master", "trainer1")

    @pytest.mark.upstream("dist_autograd/_do_test")
    def test_a_role_beyond_the_cluster_has_no_rank(self) -> None:
        with pytest.raises(ValueError, match=r"^trainer 2 is not in a cluster of 1 master, 2 trainer\(s\)"):
            Topology(2, 1).rank(Role(RoleKind.TRAINER, 2))


class TestErrors:
    def test_a_config_error_survives_the_way_between_processes(self) -> None:
        error = pickle.loads(pickle.dumps(ConfigError("train.batch_size", "must be at least 1", 0)))
        assert type(error) is ConfigError
        assert (error.key, error.rule, error.value) == ("train.batch_size", "must be at least 1", 0)
        assert str(error) == "train.batch_size = 0: must be at least 1"

    def test_every_error_is_the_users_to_mend(self) -> None:
        assert issubclass(ConfigError, HybridError)
        assert issubclass(ClusterError, HybridError)
        assert str(ConfigError("data.path", "must not be empty")) == "data.path: must not be empty"


class TestBatch:
    def test_bags_are_laid_out_as_drawn_in_the_docstring(self) -> None:
        sparse = SparseFeatures.from_bags([[[4, 7], [], [2]], [[5], [1], [9]]])
        assert sparse.ids_L.tolist() == [4, 7, 2, 5, 1, 9]
        assert sparse.offsets is not None
        assert sparse.offsets.tolist() == [0, 2, 2, 3, 4, 5, 6]
        assert (sparse.num_features, sparse.batch_size, sparse.weights_L) == (2, 3, None)

    def test_weights_follow_their_ids(self) -> None:
        sparse = SparseFeatures.from_bags([[[4, 7], []], [[5], [1]]], [[[0.5, 2.0], []], [[1.0], [3.0]]])
        assert sparse.weights_L is not None
        assert sparse.weights_L.dtype == torch.float32
        assert sparse.weights_L.tolist() == [0.5, 2.0, 1.0, 3.0]

    def test_without_offsets_each_sample_has_one_id_of_each_feature(self) -> None:
        assert SparseFeatures(torch.arange(6), None, None, 2).batch_size == 3

    def test_batches_of_no_samples_and_of_no_features(self) -> None:
        assert SparseFeatures.from_bags([[], []]).batch_size == 0
        assert SparseFeatures.from_bags([]).batch_size == 0
        assert SparseFeatures(torch.empty(0, dtype=torch.int64), None, None, 0).batch_size == 0


class TestMemory:
    FREE = 1000 << 20

    @pytest.fixture(autouse=True)
    def host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        vitals = SimpleNamespace(available=self.FREE)
        monkeypatch.setattr("hybrid.memory.psutil.virtual_memory", lambda: vitals)

    def cgroup(self, folder: Path, limit: str, current: int, cache: int = 0) -> Path:
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{current}\n")
        (folder / "memory.stat").write_text(f"anon {current - cache}\nfile {cache}\ninactive_file {cache}\n")
        return folder

    def test_without_a_container_the_host_counts(self, tmp_path: Path) -> None:
        assert available_memory_bytes(tmp_path) == self.FREE
        assert available_memory_bytes(self.cgroup(tmp_path, "max", 10)) == self.FREE

    def test_the_containers_limit_counts_where_it_is_nearer(self, tmp_path: Path) -> None:
        assert available_memory_bytes(self.cgroup(tmp_path, str(500 << 20), 300 << 20)) == 200 << 20
        assert available_memory_bytes(self.cgroup(tmp_path, str(5000 << 20), 300 << 20)) == self.FREE

    def test_cached_files_are_not_in_the_way(self, tmp_path: Path) -> None:
        cgroup = self.cgroup(tmp_path, str(500 << 20), 490 << 20, cache=400 << 20)
        assert available_memory_bytes(cgroup) == 410 << 20

    def test_less_than_nothing_is_nothing(self, tmp_path: Path) -> None:
        assert available_memory_bytes(self.cgroup(tmp_path, "100", 300)) == 0

    def test_this_machine_has_some(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        assert available_memory_bytes() > 0


class TestLargePages:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
    @pytest.mark.parametrize("shape", [(3,), (5, 7), (1, 1), (300, 1025), (0,), (0, 4), (4, 0)])
    def test_they_hold_zeros_to_write_to(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        tensor = zeros_in_large_pages(shape, dtype)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert not tensor.any()
        tensor.add_(2)
        assert tensor.sum().item() == 2 * math.prod(shape)

    def test_two_share_nothing(self) -> None:
        first, second = (zeros_in_large_pages((2, 3), torch.float32) for _ in range(2))
        first.fill_(1.0)
        assert not second.any()

    def test_a_system_without_them_gives_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Refusing(mmap.mmap):
            def madvise(self, *_args: int) -> None:
                refused.append(True)
                raise OSError(errno.EINVAL, "Invalid argument")

        refused: list[bool] = []
        monkeypatch.setattr("hybrid.memory.mmap.mmap", Refusing)
        assert zeros_in_large_pages((2, 3), torch.float32).tolist() == [[0.0] * 3] * 2
        assert refused == [True]

    def test_nor_need_it_know_of_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr("hybrid.memory.mmap.MADV_HUGEPAGE", raising=False)
        assert zeros_in_large_pages((2, 3), torch.float32).tolist() == [[0.0] * 3] * 2

    def test_they_stay_as_long_as_any_part_is_used(self) -> None:
        row_D = zeros_in_large_pages((1000, 3), torch.float32)[7]
        assert row_D.fill_(4.0).tolist() == [4.0] * 3


class TestClock:
    def test_phases_add_up_and_start_anew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ticks = iter([0.0, 1.0, 10.0, 12.0, 20.0, 23.0])
        monkeypatch.setattr("hybrid.clock.time.perf_counter", lambda: next(ticks))
        clock = StepClock()
        for name in ("lookup", "dense", "lookup"):
            with clock.phase(name):
                pass
        assert clock.take() == {**dict.fromkeys(PHASES, 0.0), "lookup": 4.0, "dense": 2.0}
        assert clock.take() == dict.fromkeys(PHASES, 0.0)

    def test_time_counts_even_where_the_phase_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ticks = iter([0.0, 1.5])
        monkeypatch.setattr("hybrid.clock.time.perf_counter", lambda: next(ticks))
        clock = StepClock()
        with pytest.raises(ZeroDivisionError), clock.phase("data"):
            _ = 1 / 0
        assert clock.take()["data"] == 1.5

    def test_a_phase_that_does_not_exist_is_a_mistake(self) -> None:
        with pytest.raises(KeyError), StepClock().phase("lunch"):
            pass


class TestPaths:
    @pytest.fixture(autouse=True)
    def new_year(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(paths, "datetime", SimpleNamespace(now=lambda: datetime(2030, 1, 2, 3, 4, 5)))

    def test_a_run_is_named_after_itself_and_the_time(self) -> None:
        assert paths.run_path(RunConfig()) == Path("runs/run-20300102-030405")
        assert paths.run_path(RunConfig(run=RunSection(folder="here"))) == Path("here")

    @pytest.mark.parametrize("name", ["run", "v1.2"])
    def test_runs_of_the_same_second_are_numbered(self, name: str) -> None:
        config = RunConfig(run=RunSection(name=name))
        found = []
        for _ in range(3):
            found.append(paths.run_path(config))
            found[-1].mkdir(parents=True)
        first = f"runs/{name}-20300102-030405"
        assert list(map(str, found)) == [first, f"{first}.2", f"{first}.3"]

    def test_a_folder_that_holds_a_run_is_refused(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        paths.refuse_existing(run)
        run.mkdir()
        (run / "notes.txt").write_text("mine")
        paths.refuse_existing(run)
        (run / "metrics.jsonl").touch()
        with pytest.raises(ConfigError, match=rf"^run\.folder = '{run}': holds a run already"):
            paths.refuse_existing(run)
        with pytest.raises(ConfigError, match=r"notes\.txt': is a file; choose another"):
            paths.refuse_existing(run / "notes.txt")

    def test_the_own_command_can_be_called(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        script = tmp_path / "bin" / "hybrid"
        script.parent.mkdir()
        monkeypatch.setattr("sys.executable", str(script.with_name("python")))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PATH", "/usr/bin")
        assert paths.own_command() == "python -P -m workers"
        script.touch(mode=0o755)
        assert paths.own_command() == "bin/hybrid"
        monkeypatch.setenv("PATH", str(script.parent))
        assert paths.own_command() == "hybrid"

    def test_the_other_places(self) -> None:
        assert paths.cache_folder(RunConfig()) == Path("runs/.prepared")
        assert paths.cache_folder(RunConfig(data=DataSection(cache_folder="c"))) == Path("c")
        assert paths.log_path(Path("r"), Role(RoleKind.WORKER, 1)) == Path("r/logs/worker-1.log")


class TestListener:
    def test_a_free_port_on_the_given_address_only(self) -> None:
        with listen("127.0.0.1", 0) as listener:
            address, port = listener.getsockname()
            assert address == "127.0.0.1"
            with socket.create_connection((address, port), timeout=5):
                listener.accept()[0].close()
            # The same port of another address is not taken, neither there nor by a wildcard here.
            with listen("127.0.0.2", port):
                pass
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", port), timeout=5)

    def test_a_port_in_use_names_the_port(self) -> None:
        with listen("127.0.0.1", 0) as first:
            port = first.getsockname()[1]
            with pytest.raises(ConfigError, match=rf"^cluster\.master_port = {port}: Address already in use"):
                listen("127.0.0.1", port)

    @pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1", "not an address"])
    def test_an_address_that_is_not_here_names_the_address(self, address: str) -> None:
        with pytest.raises(
            ConfigError, match=rf"^cluster\.master_address = '{address}': cannot listen on it: \w"
        ):
            listen(address, 0)

    def test_a_port_is_free_again_once_closed(self) -> None:
        with listen("127.0.0.1", 0) as first:
            port = first.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                first.accept()[0].close()
        listen("127.0.0.1", port).close()


class TestDevice:
    @pytest.fixture
    def num_gpus(self, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
        count: int = request.param
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        return count

    @pytest.mark.parametrize(
        ("num_gpus", "setting", "trainer", "device"),
        [
            (0, "auto", 0, "cpu"),
            (0, "cpu", 0, "cpu"),
            (2, "cpu", 0, "cpu"),
            (2, "auto", 0, "cuda:0"),
            (2, "auto", 3, "cuda:1"),
            (2, "cuda", 1, "cuda:1"),
            (2, "cuda:1", 0, "cuda:1"),
        ],
        indirect=["num_gpus"],
    )
    def test_settings_mean(self, num_gpus: int, setting: str, trainer: int, device: str) -> None:
        assert choose_devices(DenseSection(device=setting), trainer) == [torch.device(device)]

    @pytest.mark.parametrize("num_gpus", [4], indirect=True)
    def test_the_launchers_local_rank_decides(self, num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_RANK", "2")
        assert choose_devices(DenseSection(), 9) == [torch.device("cuda:2")]

    @pytest.mark.parametrize(
        ("num_gpus", "setting", "rule"),
        [
            (0, "cuda", r"this machine has 0 GPU\(s\)"),
            (0, "cuda:0", r"this machine has 0 GPU\(s\)"),
            (2, "cuda:2", r"this machine has 2 GPU\(s\)"),
            (2, "gpu", "must be auto, cpu, cuda or cuda:N"),
            (2, "", "must be auto, cpu, cuda or cuda:N"),
            (2, "cuda:x", "must be auto, cpu, cuda or cuda:N"),
            (2, "cuda:-1", "must be auto, cpu, cuda or cuda:N"),
            (2, "meta", "must be auto, cpu, cuda or cuda:N"),
        ],
        indirect=["num_gpus"],
    )
    def test_other_settings_are_refused(self, num_gpus: int, setting: str, rule: str) -> None:
        with pytest.raises(ConfigError, match=rf"^dense\.device = '{setting}': {rule}$"):
            choose_devices(DenseSection(device=setting), 0)

    @pytest.mark.parametrize(
        ("devices", "backend"),
        [
            (["a/cuda:0"], "nccl"),
            (["a/cuda:0", "a/cuda:1"], "nccl"),
            (["a/cuda:0", "b/cuda:0"], "nccl"),
            (["a/cuda:0", "a/cuda:0"], "gloo"),
            (["a/cuda:0", "a/cpu"], "gloo"),
            (["cuda-host/cpu", "a/cpu"], "gloo"),
        ],
    )
    def test_nccl_only_where_every_trainer_has_a_gpu_of_its_own(
        self, devices: list[str], backend: str
    ) -> None:
        assert choose_backend(devices) == backend


class TestDenseOptimizer:
    def test_it_steps_with_the_gradients_that_it_is_given(self) -> None:
        used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        unused.grad = torch.ones(2)  # left by somebody else; not of this step
        optimizer = DenseOptimizer(torch.optim.SGD([used, unused], lr=0.5), Schedule())
        optimizer.step(0, {used: torch.tensor([1.0, 2.0])})
        assert used.tolist() == [0.5, 0.0]
        assert unused.tolist() == [1.0, 1.0]
        assert used.grad is None
        assert unused.grad is None

    def test_gradients_are_scaled_and_left_as_they_are(self) -> None:
        parameter, gradient = nn.Parameter(torch.ones(2)), torch.tensor([1.0, 2.0])
        optimizer = DenseOptimizer(torch.optim.SGD([parameter], lr=0.5), Schedule())
        optimizer.step(0, {parameter: gradient}, scale=0.5)
        assert parameter.tolist() == [0.75, 0.5]
        assert gradient.tolist() == [1.0, 2.0]

    def test_rates_follow_the_schedule_by_the_number_of_the_step(self) -> None:
        first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 3.0}]
        section = ScheduleSection(kind="step", decay_every=10, decay_factor=0.5)
        optimizer = DenseOptimizer(torch.optim.SGD(groups, lr=1.0), Schedule(section))
        for step in (20, 0, 10):  # as after a checkpoint, and in no order
            optimizer.step(step, {first: torch.ones(1), second: torch.ones(1)})
        assert (first.item(), second.item()) == (-1.75, -5.25)

    def test_a_checkpoint_brings_states_and_no_settings(self) -> None:
        def stepped(rate: float) -> torch.optim.Optimizer:
            parameter = nn.Parameter(torch.ones(2))
            optimizer = torch.optim.Adam([parameter], lr=rate)
            DenseOptimizer(optimizer, Schedule()).step(0, {parameter: torch.ones(2)})
            return optimizer

        stored, optimizer = stepped(0.5).state_dict(), stepped(0.25)
        DenseOptimizer(optimizer, Schedule()).load(stored["state"], Path("checkpoint"))
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], stored["state"][0]["exp_avg"])

    def test_the_norm_of_gradients(self) -> None:
        gradients = [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])]
        assert squared_norm(gradients) == 169.0
        assert squared_norm([]) == 0.0
        assert squared_norm([torch.full((10,), 1e30)]) == pytest.approx(1e61)  # beyond float32
        assert math.isnan(squared_norm([torch.tensor([1.0, math.nan])]))


class TestStaleness:
    def test_parts_add_up(self) -> None:
        whole = Staleness(2, 3, 2) + Staleness(1, 4, 4) + Staleness()
        assert whole == Staleness(3, 7, 4)
        assert whole.mean == pytest.approx(7 / 3)
        assert Staleness().mean == 0.0

"""What is measured beside the training: stretches of time, NVML's figures, epoch times of scripts without the API."""

from __future__ import annotations

import csv
import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.errors import ConfigError, UsageError
from phalanx.records import Epoch, Exit, Gpu, Peak, Profile, RecordWriter, Start, Step, Workload, read_records
from phalanx.report.read.runs import read_run
from phalanx.run import gpu_sampler
from phalanx.run.gpu_sampler import GpuSampler
from phalanx.run.profiling import spans_of
from phalanx.run.spans import beside, covered, union


def test_stretches_of_time_against_counting_each_second() -> None:
    draw = random.Random(3)
    for _ in range(200):
        some, others = (
            [(begin := draw.randrange(40), begin + draw.randrange(6)) for _ in range(draw.randrange(8))]
            for _ in range(2)
        )
        seconds = [{at for begin, end in spans for at in range(begin, end)} for spans in (some, others)]
        assert covered(union(some)) == len(seconds[0])
        assert beside(union(some), union(others)) == len(seconds[0] & seconds[1])


def event(name: str, begin: int, end: int, device: str = "CPU", marked: bool = False) -> Any:
    kind = getattr(torch._C._autograd.DeviceType, device)
    times = SimpleNamespace(start=begin * 1e6, end=end * 1e6)  # the profiler counts microseconds
    return SimpleNamespace(name=name, time_range=times, device_type=kind, is_user_annotation=marked)


def test_kernels_collectives_and_what_is_neither() -> None:
    on_gpu = [
        event("gemm", 0, 4, "CUDA"),
        event("gemm", 3, 5, "CUDA"),
        event("ncclDevKernel_AllReduce_Sum_f32", 4, 8, "CUDA"),
        event("Memcpy HtoD (Pinned -> Device)", 20, 30, "CUDA"),
        event("Optimizer.step#SGD.step", 0, 50, "CUDA", marked=True),
        event("aten::mm", 0, 60),
    ]
    assert spans_of(on_gpu, on_device=True) == ([(0, 5)], [(4, 8)])
    on_cpu = [
        event("aten::mm", 0, 4),
        event("gloo:all_reduce", 3, 9),
        event("c10d::allreduce_", 3, 4),
        event("mine", 0, 9),
    ]
    assert spans_of(on_cpu, on_device=False) == ([(0, 4)], [(3, 9)])


class FakeNvml:
    """A GPU that is busy in turns and takes 300 W; `counts` False: one that has no energy counter."""

    class NVMLError(Exception):
        pass

    def __init__(self, counts: bool = True) -> None:
        self.looks, self.counts, self.begin = 0, counts, time.monotonic()

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        assert handle == "the GPU"
        self.looks += 1
        return SimpleNamespace(gpu=100 if self.looks % 2 else 50)

    def nvmlDeviceGetMemoryInfo(self, _: str) -> Any:
        return SimpleNamespace(used=(1000 + self.looks) * 2**20)

    def nvmlDeviceGetPowerUsage(self, _: str) -> int:
        return 300_000  # milliwatts

    def nvmlDeviceGetTotalEnergyConsumption(self, _: str) -> float:
        if not self.counts:
            raise self.NVMLError
        return 7e9 + (time.monotonic() - self.begin) * 300_000  # millijoules, since the driver was loaded


@pytest.mark.parametrize("counts", [True, False])
def test_the_gpus_use_memory_and_energy(tmp_path: Path, counts: bool) -> None:
    writer, nvml = RecordWriter(tmp_path, 0, 1), FakeNvml(counts)
    sampler = GpuSampler(nvml, "the GPU", writer, 0.005)
    while nvml.looks < 25:
        time.sleep(0.005)
    sampler.close()
    writer.close()
    found = [record for record in read_records(tmp_path) if isinstance(record, Gpu)]
    assert len(found) >= 3  # two of ten looks, and the rest at the end
    for record in found[:2]:
        assert record.utilisation == 75
        assert record.energy / record.seconds == pytest.approx(300, rel=0.02)
    assert found[-1].memory == 1000 + nvml.looks


class Machine(FakeNvml):
    """NVML of a machine with one GPU."""

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-8f3d":
            raise self.NVMLError("Not Found")
        return "the GPU"


def test_the_gpu_is_found_by_its_uuid_or_the_log_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "phalanx")
    monkeypatch.setattr(logging.getLogger("phalanx"), "propagate", True)
    uuids = ["8f3d", "a part of it"]  # of cuda:0 and cuda:1, whatever their numbers are to NVML
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device.index]))
    monkeypatch.setattr(gpu_sampler, "find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "pynvml", Machine())
    writer = RecordWriter(tmp_path, 0, 1)
    sampler = gpu_sampler.start_sampler(torch.device("cuda", 0), writer, 60.0, True)
    assert sampler is not None
    sampler.close()
    writer.close()
    (record,) = read_records(tmp_path)
    assert isinstance(record, Gpu)
    assert (record.utilisation, record.memory) == (100, 1001)  # one look, at the end
    assert gpu_sampler.start_sampler(torch.device("cuda", 1), writer, 1.0, True) is None
    assert "NVML says Not Found" in caplog.text
    for device, interval in (("cpu", 1.0), ("cuda:0", 0.0)):
        assert gpu_sampler.start_sampler(torch.device(device), writer, interval, True) is None
    monkeypatch.setattr(gpu_sampler, "find_spec", lambda _: None)
    for main, times in ((False, 0), (True, 1)):  # once a run, not once a rank
        assert gpu_sampler.start_sampler(torch.device("cuda", 0), writer, 1.0, main) is None
        assert caplog.text.count("pip install 'phalanx[nvml]'") == times


def test_a_run_without_a_word_in_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workload, memory, and a window that begins late, goes over a loop's end or never comes."""
    monkeypatch.chdir(tmp_path)
    x = torch.randn(40, 6)
    for name, steps, start, expected in (
        ("whole", 3, 4, [(5, 3)]),
        ("cut", 8, 7, [(8, 3)]),
        ("next", 2, 10, [(11, 2)]),
        ("never", 3, 99, []),
    ):
        measure = {"profile_steps": steps, "profile_start": start}
        with phalanx.init(name=name, progress=False, accumulate=2, measure=measure) as run:
            model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))
            model[0].bias.requires_grad_(False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = run.prepare(model, optimizer, DataLoader(TensorDataset(x), batch_size=2))
            for _ in run.epochs(2):
                for (batch,) in run.steps(loader):
                    with run.accumulate(model):
                        run.backward(model(batch).square().mean())
                        optimizer.step()
                        optimizer.zero_grad()
        records = read_records(run.run_dir)
        (work,) = [record for record in records if isinstance(record, Workload)]
        assert (work.parameters, work.gradient_bytes) == (41, 4 * 36)
        assert (work.batch_size, work.accumulate, work.dataset, work.precision) == (2, 2, 40, "fp32")
        windows = [record for record in records if isinstance(record, Profile)]
        assert [(window.step, window.steps) for window in windows] == expected
        for window in windows:
            assert 0 < window.compute < window.seconds
            assert window.communication == window.exposed == 0
        assert all(record.host > 50 for record in records if isinstance(record, Peak))


def test_the_scripts_own_profiler_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.profiler import profile

    monkeypatch.chdir(tmp_path)
    with phalanx.init(name="own", progress=False, measure={"profile_steps": 2, "profile_start": 1}) as run:
        model = nn.Linear(6, 1)
        model, loader = run.prepare(model, DataLoader(TensorDataset(torch.randn(8, 6)), batch_size=2))
        with profile() as mine:
            for (batch,) in run.steps(loader):
                run.backward(model(batch).square().mean())
    products = [event for event in mine.events() if event.name == "aten::linear"]
    assert len(products) == 4  # each step's
    assert not [record for record in read_records(run.run_dir) if isinstance(record, Profile)]
    assert "script's own torch.profiler" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["measure.profile_steps=-1", "measure.gpu_interval=-2", "measure.gpu_interval=nan"])
def test_a_setting_that_cannot_be(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        phalanx.config.load_config(overrides=[setting], environ={})


# --- EpochTimer


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PHALANX_RUN_DIR", raising=False)
    return tmp_path


def test_epochs_of_a_hand_written_loop_are_a_run_like_any(alone: Path) -> None:
    timer = phalanx.EpochTimer("ddp", dataset=64, batch_size=8, parameters=41, precision="fp32", name="mine")
    began = time.perf_counter()
    for _ in timer.epochs(3):
        for _ in range(4):
            time.sleep(0.005)
            timer.step(16)
    took = time.perf_counter() - began
    (run_dir,) = (alone / "scalability-metrics" / "mine").iterdir()
    assert run_dir == timer.run_dir
    records = read_records(run_dir)
    start, end = records[0], records[-1]
    assert isinstance(start, Start)
    assert (start.api, start.strategy, start.world_size, start.num_nodes) == ("epoch-timer", "ddp", 1, 1)
    assert isinstance(end, Exit)
    epochs = [record for record in records if isinstance(record, Epoch)]
    assert [epoch.epoch for epoch in epochs] == [0, 1, 2]
    assert [epoch.step for epoch in epochs] == [4, 8, 12]
    assert 0.06 <= sum(epoch.seconds for epoch in epochs) <= took
    steps = [record for record in records if isinstance(record, Step)]
    assert [step.samples for step in steps] == [16] * 12
    assert all(step.seconds >= 0.005 for step in steps)
    run, _ = read_run(run_dir)[:2]
    assert run is not None
    assert (run.label, run.baseline, len(run.epochs), len(run.steps)) == ("ddp (baseline)", True, 3, 12)


def test_times_that_were_taken_elsewhere_and_the_csv_that_other_tools_read(alone: Path) -> None:
    with phalanx.EpochTimer("horovod", csv_file="times/epochs.csv") as timer:
        timer.add_epoch_time(0, 12.5)
        timer.add_epoch_time(1, 10.0)
    with open("times/epochs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"name": "horovod", "nodes": "1", "epoch_id": "0", "time": "12.5", "ranks": "1"},
        {"name": "horovod", "nodes": "1", "epoch_id": "1", "time": "10.0", "ranks": "1"},
    ]


def test_an_epoch_that_raises_is_not_written_and_the_end_says_why(alone: Path) -> None:
    with pytest.raises(RuntimeError), phalanx.EpochTimer("ddp") as timer, timer.epoch(0):
        raise RuntimeError("out of memory")
    records = read_records(timer.run_dir)
    assert not [record for record in records if isinstance(record, Epoch)]
    assert records[-1].exception == "RuntimeError: out of memory"  # type: ignore[attr-defined]


def test_only_rank_0_writes_and_into_the_launchs_run_directory(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, phalanx\nfor _ in phalanx.EpochTimer('ddp').epochs(1): pass\nprint('torch' in sys.modules)"
    for rank in ("1", "0"):
        words = {
            "RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
        }
        environ = {**os.environ, **words, "MASTER_PORT": "1", "PHALANX_RUN_DIR": str(alone / "here")}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
        assert done.stdout == "False\n"  # nothing is imported for it
        written = [path.name for path in alone.glob("here/records/*")]
        assert written == ([] if rank == "1" else ["0.1.jsonl"])
    assert not (alone / "scalability-metrics").exists()


def test_a_script_started_again_in_its_run_directory_keeps_the_epochs_before(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_RUN_DIR", str(alone / "here"))
    timer = phalanx.EpochTimer("ddp")
    for epoch in timer.epochs(9):
        for _ in range(3):
            timer.step(8)
        if epoch == 2:
            break  # in the middle of it, as a checkpoint of epoch 1's end is what there is
    timer.close()
    timer = phalanx.EpochTimer("ddp")
    for _ in timer.epochs(4, first=2):
        for _ in range(3):
            timer.step(8)
    records = read_records(alone / "here")
    assert [record.epoch for record in records if isinstance(record, Epoch)] == [0, 1, 2, 3]
    assert [record.step for record in records if isinstance(record, Step)] == list(range(1, 13))
    run, _ = read_run(alone / "here")[:2]
    assert run is not None
    assert run.epochs[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("end", "said"), [("break", ""), ("raise ValueError('no data')", "ValueError: no data")])
def test_the_end_of_a_loop_that_was_left_is_recorded(alone: Path, end: str, said: str) -> None:
    code = f"import phalanx\nfor epoch in phalanx.EpochTimer('ddp', name='left').epochs(9):\n if epoch: {end}"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    (run_dir,) = alone.glob("scalability-metrics/left/*")
    records = read_records(run_dir)
    assert [record.epoch for record in records if isinstance(record, Epoch)] == [0]
    assert [record.exception for record in records if isinstance(record, Exit)] == [said]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"strategy": ""}, "EpochTimer(''): expected a strategy's name"),
        ({"strategy": "ddp", "dataset": 0}, "EpochTimer(dataset=0): expected a number from 1"),
        ({"strategy": "ddp", "batch_size": -4}, "EpochTimer(batch_size=-4)"),
        ({"strategy": 3}, "EpochTimer(3): expected a strategy's name"),
        (
            {"strategy": "ddp", "csv_file": "/proc/none/t.csv"},
            "EpochTimer(csv_file='/proc/none/t.csv') can't be written",
        ),
    ],
)
def test_words_that_cannot_be(alone: Path, words: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        phalanx.EpochTimer(**words)
    assert said in str(error.value)
    assert not list(alone.iterdir())


def test_epochs_do_not_nest(alone: Path) -> None:
    with (
        phalanx.EpochTimer("ddp") as timer,
        timer.epoch(0),
        pytest.raises(UsageError, match="inside epoch 0"),
        timer.epoch(1),
    ):
        pass


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda timer: timer.add_epoch_time(0, -1), "add_epoch_time(0, -1): expected an epoch's number from 0"),
        (lambda timer: timer.add_epoch_time(0, float("nan")), "add_epoch_time(0, nan)"),
        (lambda timer: timer.add_epoch_time("a", "b"), "add_epoch_time('a', 'b')"),
        (lambda timer: timer.step(-3), "EpochTimer.step(-3): expected the samples"),
        (lambda timer: list(timer.epochs("3")), "EpochTimer.epochs('3', first=0): expected numbers of epochs"),
    ],
)
def test_calls_that_cannot_be(alone: Path, call: Any, said: str) -> None:
    with phalanx.EpochTimer("ddp") as timer:
        with pytest.raises(UsageError) as error:
            call(timer)
        assert said in str(error.value)

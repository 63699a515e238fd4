"""On real CUDA devices, with NCCL: `python -m pytest -m gpu`. Deselected elsewhere.

Each test names the number of GPUs that it needs and is skipped, loudly, where there are fewer.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from tests.dist import engines
from tests.dist import test_parity as parity
from tests.dist.harness import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
COUNT = torch.cuda.device_count()


def needs(gpus: int) -> None:
    if gpus > COUNT:
        pytest.skip(f"needs {gpus} GPUs, this machine has {COUNT}")


STRATEGIES = [
    *(("single", 1), ("ddp", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 4), ("fsdp", 4)),
    *((f"deepspeed-{stage}", size) for stage in range(4) for size in (1, 2)),
    ("horovod", 2),
]
LINES = [pytest.param(*line, marks=engines.needs(line[0])) for line in STRATEGIES]
LOW = [
    parity.Variant("bf16", precision="bf16", accumulate=4, clip=0.05),
    parity.Variant("fp16", precision="fp16", optimizer="sgd"),
]


class Results:
    """The parity table on CUDA. At ZeRO's stage 0, fp16 is refused: see strategies/deepspeed.py."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        variants = parity.VARIANTS + LOW
        stage_0 = [line for line in STRATEGIES if line[0] == "deepspeed-0"]
        others = [line for line in STRATEGIES if line not in stage_0]
        self._parts = (
            parity.Results(folders, others, variants, cuda=True),
            parity.Results(folders, stage_0, [v for v in variants if v.precision != "fp16"], cuda=True),
        )

    def __getitem__(self, key: tuple[str, int, str]) -> Any:
        return self._parts[key[0] == "deepspeed-0"][key]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory)


@pytest.mark.parametrize("variant", parity.VARIANTS, ids=lambda variant: variant.id)
@pytest.mark.parametrize(("strategy", "world_size"), LINES)
def test_weights_equal_plain_torch(results: Any, strategy: str, world_size: int, variant: parity.Variant) -> None:
    """The reference runs on the CPU, so the tolerance covers another order of float32 additions."""
    needs(world_size)
    ranks = results[strategy, world_size, variant.id]
    batches = parity.global_batches(results["single", 1, variant.id])
    assert [sorted(batch) for batch in parity.global_batches(ranks)] == [sorted(batch) for batch in batches]
    expected, _ = parity.by_hand(variant, batches)
    for rank in ranks:
        for name, weight in expected.items():
            torch.testing.assert_close(rank["weights"][name], weight, rtol=1e-4, atol=1e-5)
            assert torch.equal(rank["weights"][name], ranks[0]["weights"][name])


@pytest.mark.parametrize("variant", LOW, ids=lambda variant: variant.id)
@pytest.mark.parametrize(("strategy", "world_size"), LINES)
def test_lower_precision(results: Any, strategy: str, world_size: int, variant: parity.Variant) -> None:
    """Replicas are bit-equal, and the loss after the same steps is the single process's within 1%."""
    needs(world_size)
    if (strategy, variant.precision) == ("deepspeed-0", "fp16"):
        pytest.skip("ZeRO's stage 0 has no fp16")
    ranks = results[strategy, world_size, variant.id]
    single = results["single", 1, variant.id][0]["losses"]
    for rank in ranks:
        for name, weight in ranks[0]["weights"].items():
            assert torch.equal(rank["weights"][name], weight)
    if variant.precision == "bf16":  # in fp16 the first steps are skipped until the scale fits, by chance of rounding
        assert sum(ranks[0]["losses"]) == pytest.approx(sum(single), rel=0.01)


def facts() -> dict[str, Any]:
    with phalanx.init(progress=False) as run:
        r = run.rank
        gathered = run.gather(torch.full((r + 1,), float(r), device=run.device))
        stream = DataLoader(TensorDataset(torch.arange(5.0)), batch_size=1, pin_memory=True)
        (seen,) = zip(*run.evaluate(run.prepare(stream)), strict=True)
        return {
            "device": str(run.device),
            "backend": dist.get_backend_config() if dist.is_initialized() else "",
            "mean": run.reduce(torch.tensor(float(r), device=run.device)).item(),
            "number": run.reduce(float(r), op="max"),
            "gathered": gathered.tolist(),
            "object": run.broadcast({"from": r}, src=run.world_size - 1),
            "seen": [x for batch in seen for x in batch.tolist()],
            "where": {str(batch.device) for batch in seen},
        }


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_has_its_device_and_the_collectives_work(tmp_path: Path, world_size: int) -> None:
    needs(world_size)
    ranks = run_ranks(facts, world_size, folder=tmp_path, cuda=True)
    for rank, got in enumerate(ranks):
        assert got["device"] == f"cuda:{rank}"
        assert got["where"] == {f"cuda:{rank}"}
        assert got["backend"] == ("" if world_size == 1 else "cpu:gloo,cuda:nccl")
        assert got["mean"] == pytest.approx((world_size - 1) / 2)
        assert got["number"] == world_size - 1
        assert got["gathered"] == [float(r) for r in range(world_size) for _ in range(r + 1)]
        assert got["object"] == {"from": world_size - 1}
    assert sorted(x for got in ranks for x in got["seen"]) == [0.0, 1.0, 2.0, 3.0, 4.0]


def one_visible() -> str:
    with phalanx.init(progress=False) as run:
        total = run.reduce(torch.ones((), device=run.device), op="sum").item()
        return f"{run.device} {os.environ['CUDA_VISIBLE_DEVICES']} {total}"


def test_one_visible_device_per_task_is_index_0(tmp_path: Path) -> None:
    """As Slurm's --gpus-per-task binds them: each rank sees its own device only."""
    needs(2)
    ranks = run_ranks(one_visible, 2, folder=tmp_path, env=lambda rank: {"CUDA_VISIBLE_DEVICES": str(rank)}, cuda=True)
    assert ranks == ["cuda:0 0 2.0", "cuda:0 1 2.0"]


def train_and_save(strategy: str, device: str, resume: bool) -> dict[str, Any]:
    """Four epochs with dropout, or the end of them from the checkpoint at step 9."""
    settings: dict[str, Any] = {"resume": "latest"} if resume else {"checkpoint": {"every_steps": 9}}
    with phalanx.init(strategy=strategy, device=device, name="moved", seed=1, progress=False, **settings) as run:
        model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = torch.sin(torch.arange(240.0)).reshape(40, 6)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        loader = DataLoader(data, batch_size=8 // run.world_size, shuffle=True)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        at = run.resume() if resume else None
        loaded = {n.removeprefix("module."): parity.full(p) for n, p in model.state_dict().items()}
        moments = {i: parity.full(s["exp_avg_sq"]) for i, s in enumerate(optimizer.state.values())}
        epochs = []
        for epoch in run.epochs(4 if resume else 2):
            epochs.append(epoch)
            for xb, yb in run.steps(loader):
                run.backward(nn.functional.mse_loss(model(xb), yb))
                optimizer.step()
                optimizer.zero_grad()
        return {"loaded": loaded, "moments": moments, "at": at, "epochs": epochs, "step": run.step}


MOVES = [
    (("ddp", "cuda", 2), ("single", "cuda", 1)),
    (("fsdp", "cuda", 2), ("single", "cuda", 1)),
    (("single", "cuda", 1), ("ddp", "cuda", 2)),
    (("ddp", "cuda", 1), ("fsdp", "cuda", 2)),
    (("fsdp", "cuda", 2), ("ddp", "cpu", 2)),
    (("fsdp", "cuda", 2), ("fsdp", "cpu", 2)),
    (("ddp", "cpu", 2), ("fsdp", "cuda", 2)),
    (("fsdp", "cpu", 2), ("single", "cuda", 1)),
    (("fsdp", "cuda", 1), ("single", "cpu", 1)),
]


@pytest.mark.parametrize(("source", "target"), MOVES, ids=lambda side: "-".join(map(str, side)))
def test_a_checkpoint_moves_between_gpus_and_the_cpu(tmp_path: Path, source: Any, target: Any) -> None:
    needs(max(side[2] for side in (source, target) if side[1] == "cuda"))
    saved = run_ranks(train_and_save, source[2], source[0], source[1], False, folder=tmp_path, cuda=True)
    again = run_ranks(train_and_save, source[2], source[0], source[1], True, folder=tmp_path, cuda=True)
    moved = run_ranks(train_and_save, target[2], target[0], target[1], True, folder=tmp_path, cuda=True)
    assert saved[0]["step"] == 10
    for rank in moved:
        assert (again[0]["at"], rank["at"]) == (9, 9)
        assert rank["epochs"] == [1, 2, 3]
        assert rank["step"] == 20
        for part in ("loaded", "moments"):
            for key, value in again[0][part].items():
                assert torch.equal(rank[part][key], value), (part, key)


def half_train(strategy: str, epochs: int, resume: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {"resume": "latest"} if resume else {"checkpoint": {"every_steps": 6}}
    with phalanx.init(strategy=strategy, precision="fp16", name="half", seed=1, progress=False, **settings) as run:
        model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = torch.sin(torch.arange(240.0)).reshape(40, 6)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8 // run.world_size)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        for _ in run.epochs(epochs):
            for xb, yb in run.steps(loader):
                run.backward(nn.functional.mse_loss(model(xb), yb))
                optimizer.step()
                optimizer.zero_grad()
        scaler = run._session.contents.stateful["scaler"].state_dict()
        weights = run._session.strategy.saved_model(model).state_dict()
        return {"weights": {name: parity.full(value) for name, value in weights.items()}, "scale": scaler["scale"]}


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=engines.needs("deepspeed")) for stage in ("2", "3")])
def test_fp16_under_zero_resumes_exactly_and_moves_to_ddp(tmp_path: Path, stage: str) -> None:
    """The loss scale is part of a checkpoint: DeepSpeed's own would start anew, and skip steps."""
    needs(2)
    env = {"PHALANX_DEEPSPEED__ZERO_STAGE": stage}
    whole = run_ranks(half_train, 2, "deepspeed", 8, False, folder=tmp_path, cuda=True, env=env)
    short = tmp_path / "short"
    short.mkdir()
    run_ranks(half_train, 2, "deepspeed", 3, False, folder=short, cuda=True, env=env)
    moved = run_ranks(half_train, 2, "ddp", 3, True, folder=short, cuda=True)
    resumed = run_ranks(half_train, 2, "deepspeed", 8, True, folder=short, cuda=True, env=env)
    for rank, again in zip(whole, resumed, strict=True):
        assert again["scale"] == rank["scale"]
        for name, weight in rank["weights"].items():
            assert torch.equal(again["weights"][name], weight), name
    assert moved[0]["scale"] > 0


@pytest.mark.parametrize(("strategy", "gpus"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_the_digits_by_one_command(tmp_path: Path, strategy: str, gpus: int) -> None:
    needs(gpus)
    command = [sys.executable, "-m", "phalanx", "run", "--nproc", str(gpus), "--strategy", strategy]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [*command, "precision=bf16", str(ROOT / "examples/digits/train.py")],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    accuracy = re.fullmatch(r"test accuracy (0\.\d+)", last)
    assert accuracy, last
    assert float(accuracy[1]) >= 0.97
    assert "cuda:0" in done.stderr
    assert "Warning" not in done.stderr
